"""Writes the tables of docs/conformance.md: every check, and what none of them tries.

python -m devtools.conformance_page [--check]
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from devtools.generated_page import write_or_check
from rollfleet_cli.conformance.checks.catalogue import CHECKS, ENGINE_CHECKS, NOT_TRIED, UPDATE_CHECKS

PAGE = Path("docs/conformance.md")
BEGIN, END = "<!-- made by devtools/conformance_page.py: {} -->\n", "<!-- end -->\n"


def check_rows() -> Iterator[str]:
    """The table of checks."""
    yield "| check | what | closes | asked of | if it fails |"
    yield "|---|---|---|---|---|"
    engines, updates = {check.id for check in ENGINE_CHECKS}, {check.id for check in UPDATE_CHECKS}
    for name, check in CHECKS.items():
        of = "each engine" if name in engines else "the fleet, `--disruptive`" if name in updates else "all together"
        yield f"| `{name}` | {_cell(check.title)} | {check.closes.value} | {of} | {_cell(check.remedy)} |"


def not_tried_rows() -> Iterator[str]:
    """What no check tries."""
    for what, why in NOT_TRIED:
        yield f"- {what}: {why}"


def _cell(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")


def render(page: str) -> str:
    """The page with its tables as they are now."""
    for name, lines in (("checks", check_rows()), ("not tried", not_tried_rows())):
        begin = BEGIN.format(name)
        head, _, rest = page.partition(begin)
        _, found, tail = rest.partition(END)
        if not found:
            raise ValueError(f"{PAGE} has no part {begin.strip()} that ends with {END.strip()}")
        page = f"{head}{begin}{chr(10).join(lines)}\n{END}{tail}"
    return page


def main(arguments: list[str] | None = None) -> int:
    """0: written, or nothing to write; 1: --check found a difference."""
    return write_or_check(PAGE, render, arguments)


if __name__ == "__main__":
    sys.exit(main())
