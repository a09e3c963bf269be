"""Makes the stand-in run importable, in spawned processes too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
