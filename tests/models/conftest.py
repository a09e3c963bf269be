"""Makes `model_shapes` importable in the tests of this directory."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
