"""What the pages say that can be checked: links, files, targets of make, objects, command lines."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
# For readers, not the decisions: those tell what was so on their day.
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md")))
ALL_PAGES = (*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "adr").glob("*.md")))
FENCE = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")
RECIPES_ON = ROOT / "docs" / "launch.md"
RECIPES_FOR = ROOT / "examples" / "rolloutengine.yaml"


def name_of(page: Path) -> str:
    """Of a test's parameter."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Fenced texts of a language."""
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def prose(page: Path) -> str:
    """What stands outside of fences."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What a link may name after its #, as GitHub makes it of a heading."""
    found: set[str] = set()
    for heading in re.findall(r"(?m)^#{1,6} (.+)$", prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


def recipes() -> list[dict[str, Any]]:
    """The fleets of launch.md: what is written there in place of the same fields of the example."""
    [text] = blocks(RECIPES_ON, "yaml")
    fleets = []
    for number, changes in enumerate(yaml.safe_load_all(text)):
        fleet = yaml.safe_load(RECIPES_FOR.read_text())
        fleet["metadata"]["name"] = f"recipe-{number}"
        fleet["spec"] |= changes
        fleets.append(fleet)
    return fleets


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every whole object that an example or a page shows, with where."""
    for file in sorted((ROOT / "examples").rglob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            yield name_of(file), document
    for page in PAGES:
        for text in blocks(page, "yaml") if page != RECIPES_ON else ():
            for document in yaml.safe_load_all(text):
                yield name_of(page), document
    for fleet in recipes():
        yield name_of(RECIPES_ON), fleet


def our_objects() -> list[tuple[str, dict[str, Any]]]:
    """Of them those of our kinds."""
    return [(where, document) for where, document in objects() if document["apiVersion"].startswith("rollfleet.io/")]
