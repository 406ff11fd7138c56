"""The entry point of the engine's image, where the base has no CANN (tests/images has one that has)."""

import subprocess
from pathlib import Path

from rollfleet_engine import launch

ENTRYPOINT = Path(launch.__file__).with_name("entrypoint.sh")


def test_a_command_that_it_is_given_takes_the_launcher_s_place() -> None:
    words = ["printf", "%s,", "a b", "--version=1"]
    done = subprocess.run(["bash", ENTRYPOINT, *words], capture_output=True, text=True, check=True, timeout=20)
    assert (done.stdout, done.stderr) == ("a b,--version=1,", "")
