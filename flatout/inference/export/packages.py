"""The optional packages of exports. No torch, so that a missing one is reported at once."""

from __future__ import annotations

from importlib.util import find_spec

from flatout.errors import MissingPackage


def require_package(package: str, purpose: str) -> None:
    """Check that the package of an extra is installed. `purpose` starts the sentence about it.

    Raises: MissingPackage with the install line.
    """
    if find_spec(package) is None:
        raise MissingPackage(
            f"{purpose} the package {package}, which is not installed.",
            fix=f'Install it: `pip install "flatout[{package}]"`.',
        )
