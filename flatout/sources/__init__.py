"""Where text comes from: one file a source."""
