"""Runs make targets in turn, tells how long each took, ends with all results, and stops at the first failure.

python -m devtools.layers unit contract
"""

import subprocess
import sys
import time

LIMIT_S = 5400.0  # for one target; CI has no more for all of them


def run(target: str) -> tuple[bool, float]:
    """Whether the target passed, and its seconds."""
    print(f"== {target}", flush=True)
    started = time.monotonic()
    try:
        passed = subprocess.run(["make", "--no-print-directory", target], check=False, timeout=LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{target}: not done within {LIMIT_S:.0f} s", flush=True)
        passed = False
    return passed, time.monotonic() - started


def main(targets: list[str]) -> int:
    """Exit status 1 at the first target that fails."""
    lines = []
    for target in targets:
        passed, seconds = run(target)
        lines.append(f"{target:<14} {'passed' if passed else 'FAILED'} {seconds:8.1f} s")
        if not passed:
            break
    print("\n" + "\n".join(lines), flush=True)
    return 0 if len(lines) == len(targets) and all("passed" in line for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
