"""A clock that the tests set."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
