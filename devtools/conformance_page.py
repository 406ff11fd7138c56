"""Writes the tables of docs/conformance.md: every check, and which of them close what is untested on hardware.

python -m devtools.conformance_page [--check]
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rollfleet_cli.conformance.checks.catalogue import CHECKS, ENGINE_CHECKS, NOT_TRIED, UPDATE_CHECKS

PAGE = Path("docs/conformance.md")
BEGIN, END = "<!-- made by devtools/conformance_page.py: {} -->\n", "<!-- end -->\n"

# What no test of ours could try, the spec that a fleet needs for it, and the checks whose pass is the evidence.
HARDWARE = (
    (
        "what is said to vLLM-Ascend starts an engine that serves ([launch.md](launch.md))",
        "any, on NPUs",
        ("state", "facts", "probes", "metrics", "version-on-answers"),
    ),
    (
        "preflight lets a container with NPUs pass, and reads driver, CANN and chips ([preflight.md](preflight.md)); "
        "what it refuses is not tried",
        "any, on NPUs",
        ("state", "same-releases"),
    ),
    (
        "our guard and worker extension inside vLLM-Ascend: identity, routes, the probe on every worker",
        "any, on NPUs",
        ("identity", "native-control", "no-control-on-serving", "probe", "probe-as-served", "same-answers"),
    ),
    (
        "weights change in place on NPUs from a checkpoint: pause, transfer, digest, coverage, cache reset "
        "(`rlConfig.enabled`)",
        "a committed checkpoint and `engine.args: [--enable-prompt-tokens-details]`, asked with `--disruptive`",
        ("update-active", "update-atomic", "update-caches", "update-answers", "same-weights"),
    ),
    ("data-parallel ranks on NPUs", "`parallelism.data` above 1", ("ranks", "facts", "probe")),
    ("batch invariance on NPUs", "`rlConfig.enableBatchInvariant`", ("batch-invariance", "same-answers")),
    ("routed experts on NPUs", "`features.routedExperts`, an MoE model", ("routed-experts",)),
    ("trace replay on NPUs", "`features.traceReplay`, vLLM 0.29 or newer", ("trace-replay", "token-endpoint")),
    (
        "the token endpoint and tool calling on NPUs",
        "`features.tokenEndpoint`, `features.toolCalling`",
        ("token-endpoint", "tool-calling"),
    ),
)
# What is untested on hardware and stays so, whatever a report says.
OPEN = (
    ("pushes by `hccl` and `ipc`, `weightTransfer`", "a trainer has to send, and no object asks for a push yet"),
    (
        "sleep on NPUs, `sleepModeExtraCleanup`",
        "no object puts an engine to sleep yet; `facts` shows only that the engine can",
    ),
    ("`enableTrainingConsistency`", "whether a trainer computes the same is for the trainer to say"),
)


def check_rows() -> Iterator[str]:
    """The table of checks."""
    yield "| check | what | closes | asked of | if it fails |"
    yield "|---|---|---|---|---|"
    engines, updates = {check.id for check in ENGINE_CHECKS}, {check.id for check in UPDATE_CHECKS}
    for name, check in CHECKS.items():
        of = "each engine" if name in engines else "the fleet, `--disruptive`" if name in updates else "all together"
        yield f"| `{name}` | {_cell(check.title)} | {check.closes.value} | {of} | {_cell(check.remedy)} |"


def hardware_rows() -> Iterator[str]:
    """The table of what is untested on hardware."""
    yield "| untested on hardware | a fleet with | closed where these pass |"
    yield "|---|---|---|"
    for what, spec, names in HARDWARE:
        yield f"| {what} | {spec} | {', '.join(f'`{name}`' for name in names)} |"
    for what, why in OPEN:
        yield f"| {what} | | by no report: {why} |"


def not_tried_rows() -> Iterator[str]:
    """What no check tries."""
    for what, why in NOT_TRIED:
        yield f"- {what}: {why}"


def _cell(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")


def render(page: str) -> str:
    """The page with its tables as they are now."""
    for name, lines in (("checks", check_rows()), ("hardware", hardware_rows()), ("not tried", not_tried_rows())):
        begin = BEGIN.format(name)
        head, _, rest = page.partition(begin)
        _, found, tail = rest.partition(END)
        if not found:
            raise ValueError(f"{PAGE} has no part {begin.strip()} that ends with {END.strip()}")
        page = f"{head}{begin}{chr(10).join(lines)}\n{END}{tail}"
    return page


def main(arguments: list[str] | None = None) -> int:
    """0: written, or nothing to write; 1: --check found a difference."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/conformance.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page differs")
    check = parser.parse_args(arguments).check
    old = PAGE.read_text(encoding="utf-8")
    new = render(old)
    if new == old:
        return 0
    if check:
        print(f"{PAGE}: not as `make generate` would write it", file=sys.stderr)
        return 1
    PAGE.write_text(new, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
