"""One self-contained HTML page about one run or several: curves, events, results and settings."""
