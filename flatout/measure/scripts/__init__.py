"""Training scripts that flatout did not write: measured without an edit."""
