"""Backend gloo between processes: what it takes of memory while it streams, and of time where nobody answers."""

from __future__ import annotations

import json
import os
import re
import subprocess

from devtools import vllm_venv
from devtools.tiny_models import ROOT, source_path

DEADLINE_S = 3.0  # as in silent_store.py
LATE_S = 10.0  # of a machine that has other work: torch itself waits half an hour


def test_gloo_takes_two_buffers_beside_its_tensors() -> None:
    """128 MiB to two receivers; `make bench-pushes` measures the speed too."""
    interpreter = vllm_venv.ensure() / "bin" / "python"
    command = [str(interpreter), "-m", "tests.bench.pushes", "-n", "1", "--mib", "128", "--ranks", "2"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{source_path()}"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    found = re.search(r"receiver (\d+) MiB, sender (\d+) MiB, (\d+) allowed", ended.stdout)
    assert found is not None, ended.stderr[-2000:]
    received, sent, allowed = (int(number) for number in found.groups())
    assert max(received, sent) <= allowed


def silent_store(scene: str) -> list[tuple[float, str]]:
    """Seconds and words of each failure."""
    command = [str(vllm_venv.ensure() / "bin" / "python"), "-m", "tests.vllm.silent_store", scene]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{source_path()}"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = (line.partition(" ") for line in ended.stdout.splitlines())
    return [(float(seconds), words) for seconds, _, words in lines]


def test_a_store_that_accepts_and_stays_silent_holds_no_worker() -> None:
    [(seconds, words)] = silent_store("at-init")
    assert seconds < DEADLINE_S + LATE_S
    assert "rank 1 of 2 cannot join at 127.0.0.1" in words
    assert "no answer within 3 s" in words


def test_a_store_that_stops_answering_in_mid_update_holds_no_worker() -> None:
    [(seconds, words)] = silent_store("after-joining")
    assert seconds < DEADLINE_S + LATE_S
    assert words.startswith("gloo: after 0 of 1048576 bytes: ")


def test_workers_that_hang_again_and_again_keep_so_many_threads_and_no_more() -> None:
    *hanging, (_, last) = silent_store("again")
    assert all("no answer within 0.2 s" in words for _, words in hanging)
    assert "restart the engine" in last


def addresses_of(*wanted: str, **environ: str) -> list[str]:
    """At which ranks that want these listen."""
    command = [str(vllm_venv.ensure() / "bin" / "python"), "-m", "tests.vllm.listeners", *wanted]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{source_path()}"} | environ
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: list[str] = json.loads(ended.stdout)
    return found


def test_ranks_listen_where_they_are_reached_and_not_at_what_their_host_s_name_means() -> None:
    assert addresses_of("127.0.0.2", "127.0.0.3") == ["127.0.0.2", "127.0.0.3"]


def test_torch_s_own_variable_and_an_address_of_another_machine_leave_it_to_torch() -> None:
    assert addresses_of("127.0.0.2", "127.0.0.3", GLOO_SOCKET_IFNAME="lo") == ["127.0.0.1"]
    assert len(addresses_of("192.0.2.1", "192.0.2.1")) == 1  # kept free for documents
