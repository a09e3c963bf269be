"""Puts the generator of the tables in docs/speedups.md on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
