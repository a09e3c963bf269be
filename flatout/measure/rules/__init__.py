"""What `diagnose` and `watch` recognise: each rule is a function that looks for one cause."""
