"""Writes every file that follows from the models: `python -m rollfleet_operator.api.generate [--check]`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from rollfleet_operator.api.crd import KINDS, Kind, build_crd
from rollfleet_operator.api.meta import GROUP
from rollfleet_operator.api.reference import render_reference

HEADER = "# Made by `make generate` from operator/rollfleet_operator/api. Do not edit.\n"
CRDS = Path("crds")
CHART_CRDS = Path("charts/rollfleet/templates/crds")
REFERENCE = Path("docs/api.md")
LINE_WIDTH = 120


class _Dumper(yaml.SafeDumper):
    """Repeats equal parts instead of anchoring them, which the API server would not read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_yaml(document: dict[str, Any]) -> str:
    """A document in the order it was built in."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=LINE_WIDTH, allow_unicode=True)


def render_crd(kind: Kind) -> str:
    """The CRD as a plain manifest."""
    return HEADER + dump_yaml(build_crd(kind))


def render_chart_crd(kind: Kind) -> str:
    """The CRD as a template of the chart, under values crds.enabled and crds.keep."""
    name, rest = dump_yaml(build_crd(kind)).split("spec:\n", maxsplit=1)
    if "{{" in rest:
        raise ValueError(f"{kind.crd_name} holds '{{{{', which Helm would read as a template")
    return (
        f"{HEADER}{{{{- if .Values.crds.enabled }}}}\n{name}"
        '  labels: {{- include "rollfleet.labels" . | nindent 4 }}\n'
        "  {{- if .Values.crds.keep }}\n"
        "  annotations: {helm.sh/resource-policy: keep}\n"
        "  {{- end }}\n"
        f"spec:\n{rest}{{{{- end }}}}\n"
    )


def generate() -> dict[Path, str]:
    """All generated files, by path below the repository's root."""
    files = {REFERENCE: render_reference(KINDS)}
    for kind in KINDS:
        name = f"{GROUP}_{kind.plural}.yaml"
        files[CRDS / name] = render_crd(kind)
        files[CHART_CRDS / name] = render_chart_crd(kind)
    return files


def find_stale(root: Path, files: dict[Path, str]) -> list[Path]:
    """Files that differ from what would be generated, or are left over."""
    stale = [path for path, text in files.items() if not (root / path).is_file() or (root / path).read_text() != text]
    left_over = [
        found.relative_to(root)
        for folder in (CRDS, CHART_CRDS)
        for found in (root / folder).glob("*.yaml")
        if found.relative_to(root) not in files
    ]
    return sorted(stale + left_over)


def main(arguments: list[str] | None = None) -> int:
    """0: written, or nothing to write; 1: --check found differences."""
    parser = argparse.ArgumentParser(description="Write the files that follow from the API models.")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository's root (default: here)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name the files that differ")
    chosen = parser.parse_args(arguments)
    files = generate()
    stale = find_stale(chosen.root, files)
    for path in stale:
        if chosen.check:
            print(f"{path}: not as `make generate` would write it", file=sys.stderr)
        elif path in files:
            (chosen.root / path).parent.mkdir(parents=True, exist_ok=True)
            (chosen.root / path).write_text(files[path])
            print(f"wrote {path}")
        else:
            (chosen.root / path).unlink()
            print(f"removed {path}")
    return 1 if chosen.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
