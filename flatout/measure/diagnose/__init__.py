"""`diagnose`: from evidence to a verdict, findings and fixes."""
