"""Makes the web server importable and its fixtures available."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "remote"))

from faulty_store import store  # noqa: F401
from web_server import memory, web  # noqa: F401
