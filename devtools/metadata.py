"""Links the installed distribution's metadata beside the engine's packages.

vLLM finds our plugin by entry points. In the image they lie where PYTHONPATH leads; in the tree PYTHONPATH leads to
engine/, which is source alone. With the link an interpreter that is not this environment's finds them there too.
"""

import importlib.metadata
from pathlib import Path

ENGINE = Path(__file__).resolve().parent.parent / "engine"
NAME = "rollfleet"


def link() -> Path:
    """Make or renew the link. Raises importlib.metadata.PackageNotFoundError where nothing is installed."""
    for old in ENGINE.glob(f"{NAME}-*.dist-info"):
        old.unlink()
    metadata = Path(str(importlib.metadata.distribution(NAME).locate_file("")))
    name = f"{NAME}-{importlib.metadata.version(NAME)}.dist-info"
    target = ENGINE / name
    target.symlink_to(metadata / name)
    return target


if __name__ == "__main__":
    link()
