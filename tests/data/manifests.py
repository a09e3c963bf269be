"""Manifests that were changed on purpose, with the digest of what they say now: for tests of what
other checks find.
"""

from flatout.data.store.manifest import Manifest


def seal(path):
    """Give a manifest that was edited its digest."""
    path.write_text(
        Manifest.model_validate_json(path.read_text()).sealed().model_dump_json(indent=1) + "\n"
    )
