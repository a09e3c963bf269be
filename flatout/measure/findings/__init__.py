"""What `diagnose` and `watch` recognise: one file per cause of lost time, memory or quality."""
