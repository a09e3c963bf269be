"""The command line: commands, their parser, and what a terminal shows."""
