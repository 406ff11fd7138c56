"""preStop hook of the engine's container: `python3 -m rollfleet_engine.prestop`.

The engine aborts what it answers as soon as it gets SIGTERM, so draining comes before: this asks the guard to admit
nothing more and returns when nothing is in flight, or when drainTimeoutSeconds and the time to abort the rest are over.
"""

import json
import os
import socket
import sys
from pathlib import Path

from rollfleet_engine.guard.local import BEYOND_DRAIN_S, DRAIN, SOCKET_NAME
from rollfleet_protocol.engine_config import config_of

LONGEST_ANSWER = 4096  # bytes


def drain(path: Path, timeout_s: float) -> str:
    """What came of it, in words. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(json.dumps({"command": DRAIN}).encode() + b"\n")
        with connection.makefile("rb") as answers:
            answer = json.loads(answers.readline(LONGEST_ANSWER) or b"{}")
    if "cut" not in answer:
        raise OSError(f"the guard did not drain: {answer.get('error', 'it closed the connection')}")
    return f"drained; {answer['cut']} requests did not end by themselves"


def main() -> int:
    """0 also where there is nothing to drain: an engine that never came up has no guard."""
    config = config_of(os.environ)
    path = Path(config.run_dir) / SOCKET_NAME
    if not path.exists():
        print("no guard is running: nothing to drain")
        return 0
    try:
        print(drain(path, config.drain_timeout_seconds + BEYOND_DRAIN_S))
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}; the engine is stopped without draining", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
