"""docs/launch-table.md: what a fleet asks for, and how each release is told, from the launcher's own table.

`python -m devtools.launch_table [--check]`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollfleet_engine.launch.dialects import (
    ASCEND,
    ASCEND_BEFORE_RL_CONFIG,
    CPU,
    Dialect,
    PlatformWords,
    dialect_of,
)
from rollfleet_engine.launch.plan import TRANSFER_BACKEND
from rollfleet_engine.launch.wishes import words_for
from rollfleet_engine.launch.words import Absent, Feature, filled

PAGE = Path("docs/launch-table.md")
COLUMNS: tuple[tuple[str, str, PlatformWords], ...] = (
    ("0.23 and vLLM-Ascend 0.23", "0.23.0", ASCEND_BEFORE_RL_CONFIG),
    ("0.27.1 and vLLM-Ascend main", "0.27.1", ASCEND),
    ("0.27.1 and vLLM-Ascend without rl_config", "0.27.1", ASCEND_BEFORE_RL_CONFIG),
    ("0.29, builds before 0.30, with rl_config", "0.29.0", ASCEND),
    ("0.32 with rl_config", "0.32.0", ASCEND),
    ("CPU, 0.27.1", "0.27.1", CPU),
)


@dataclass(frozen=True)
class Row:
    """A setting of the seed document's checklist, and the field that asks for it."""

    setting: str
    feature: Feature


SEED = (
    Row("rl_config.enabled=true", Feature.RL_MODE),
    Row("--enable-sleep-mode", Feature.SLEEP),
    Row("VLLM_WORKER_MULTIPROC_METHOD=spawn", Feature.SLEEP),
    Row("rl_config.sleep_mode_extra_cleanup=true", Feature.EXTRA_CLEANUP),
    Row("rl_config.enable_training_consistency=true", Feature.TRAINING_CONSISTENCY),
    Row("rl_config.enable_batch_invariant=true", Feature.BATCH_INVARIANT),
    Row('--weight-transfer-config \'{"backend": "hccl"}\'', Feature.HCCL),
    Row('--weight-transfer-config \'{"backend": "ipc"}\'', Feature.IPC),
    Row("--enable-return-routed-experts", Feature.ROUTED_EXPERTS),
    Row("VLLM_USE_V2_MODEL_RUNNER=1", Feature.TRACE_REPLAY),
    Row("VLLM_ENABLE_SCALE_OUT_ENDPOINTS=1", Feature.TOKEN_ENDPOINT),
    Row("--enable-trace-replay", Feature.TRACE_REPLAY),
)
_BACKENDS = (Feature.HCCL, Feature.IPC, Feature.GLOO, Feature.SHM)
_HEAD = f"""<!-- Made by `make generate` from engine/rollfleet_engine/launch/dialects.py. Do not edit. -->
# How each release is told

What a RolloutEngine asks for ([launch.md](launch.md)), and the launcher's words for it. Every engine starts with
`VLLM_SERVER_DEV_MODE=1` (control routes, behind the guard) and with
`--weight-transfer-config {{"backend": "{TRANSFER_BACKEND}"}}`: one composite transfer engine.
It uses the backend that the spec names.
What is said to vLLM-Ascend is untested on hardware
([hardware.md](hardware.md)). What has no column is not started.
"""


def render() -> str:
    """The whole page."""
    told = {row.feature for row in SEED}
    parts = [
        _HEAD,
        "\n## The seed document's checklist\n\n",
        *_table([(f"`{row.setting}`", row.feature) for row in SEED], "Setting"),
        "\n## Further fields\n\n",
        *_table([("", feature) for feature in Feature if feature not in told], ""),
    ]
    return "".join(parts)


def _table(rows: list[tuple[str, Feature]], first: str) -> Iterator[str]:
    heads = [*([first] if first else []), "Field", *(head for head, _, _ in COLUMNS)]
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"
    for setting, feature in rows:
        cells = [*([setting] if first else []), f"`{feature.value}`", *(cell(feature, *column) for column in _spoken())]
        yield f"| {' | '.join(cells)} |\n"


def _spoken() -> Iterator[tuple[Dialect, PlatformWords]]:
    for _, release, platform in COLUMNS:
        dialect = dialect_of(release)
        if dialect is None:
            raise LookupError(f"no plan is made for vLLM {release}: correct COLUMNS")
        yield dialect, platform


def cell(feature: Feature, dialect: Dialect, platform: PlatformWords) -> str:
    """The words, or why there are none."""
    words = words_for(feature, dialect, platform)
    if isinstance(words, Absent):
        return f"no: {words.reason}"
    said = [f"`{name}={filled(value, '...')}`" for name, value in words.env.items()]
    said += [f"`{option} {value}`" if value else f"`{option}`" for option, value in words.options("...")]
    for option, value in (("--additional-config", words.additional), ("--compilation-config", words.compilation)):
        said += [f"`{option} {json.dumps(value)}`"] if value else []
    said += [words.note] if words.note else []
    said += [f"only with {words.needs.value}"] if words.needs else []
    if not said:
        return "the composite engine" if feature in _BACKENDS else "nothing to say"
    return ", ".join(said)


def main(arguments: list[str] | None = None) -> int:
    """0: written, or nothing to write; 1: --check found a difference."""
    parser = argparse.ArgumentParser(description="write docs/launch-table.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page differs")
    chosen = parser.parse_args(arguments)
    text = render()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if chosen.check:
        print(f"{PAGE}: not as `make generate` would write it", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
