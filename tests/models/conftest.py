"""Makes `model_shapes` importable in this folder's tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
