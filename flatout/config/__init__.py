"""A run's configuration: its schema, `section.key=value` overrides, and the messages that answer a
mistake.
"""
