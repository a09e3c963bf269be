"""What observes a step, whoever wrote the loop: windows, calls, lines, traces, and evidence."""
