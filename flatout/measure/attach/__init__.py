"""What runs inside of the process that is measured: follows its loop, times, changes."""
