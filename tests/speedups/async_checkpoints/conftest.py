"""Puts the helper modules of the training tests on the path: a stand-in for a run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "training"))
