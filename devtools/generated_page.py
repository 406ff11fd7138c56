"""A page with parts that are made: written anew, or compared with what would be written."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(page: Path, render: Callable[[str], str], arguments: list[str] | None = None) -> int:
    """0: written, or nothing to write; 1: --check found a difference. `render`: of the page as it is."""
    parser = argparse.ArgumentParser(description=f"Write the tables of {page}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page differs")
    check = parser.parse_args(arguments).check
    old = page.read_text(encoding="utf-8")
    new = render(old)
    if new == old:
        return 0
    if check:
        print(f"{page}: not as `make generate` would write it", file=sys.stderr)
        return 1
    page.write_text(new, encoding="utf-8")
    print(f"wrote {page}")
    return 0
