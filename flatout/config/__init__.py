"""The configuration of a run: its schema, `section.key=value` overrides, and error messages."""
