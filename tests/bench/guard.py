"""`make bench-guard`: an application behind its guard beside the same application alone, in one run, interleaved.

python -m tests.bench.guard [-n ROUNDS] [--seconds S]

The servers have one core of their own, the load generator another. Latency: one client, one request after the other.
Throughput: so many clients, each of which asks again as soon as it is answered. A round measures both sides, and the
next round the other side first; what is told are medians over rounds of the differences within a round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.clients import request, saturating, sequential
from tests.bench.quiet import DisturbedError, undisturbed
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SIDES = (False, True)  # with a guard?
MOST_ADDED_S = 0.3e-3
MOST_LOST = 0.05
STOP_TIMEOUT_S = 20


@dataclass(frozen=True)
class Workload:
    """What is asked of which application."""

    title: str
    kind: str
    body: bytes
    requests: int  # of the latency's part of a round
    clients: int  # of the throughput's
    most_lost: float  # share of the throughput that is allowed to be lost


def completion(tokens: int, *, stream: bool) -> bytes:
    """A prompt of some 200 characters."""
    prompt = "The weights of a rollout engine change under load, and nobody hears an answer of two versions. " * 2
    return json.dumps({"model": "policy", "prompt": prompt, "max_tokens": tokens, "stream": stream}).encode()


WORKLOADS = (
    Workload("null application", "null", completion(16, stream=False), 2000, 16, 1.0),
    Workload("simulator, 16 tokens", "simulator", completion(16, stream=False), 30, 16, MOST_LOST),
    Workload("simulator, 16 tokens streamed", "simulator", completion(16, stream=True), 30, 16, MOST_LOST),
    Workload("simulator, its core full", "simulator", completion(16, stream=False), 30, 128, MOST_LOST),
)


@dataclass
class Server:
    """One side of one application."""

    port: int
    process: "subprocess.Popen[str]"

    def cpu_s(self) -> float:
        """Processor time of its loop's thread."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e9


@dataclass
class Figures:
    """Of one side, a value a round: seconds, answers a second, seconds of processor an answer."""

    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@contextmanager
def servers(kind: str, cpu: int) -> Iterator[dict[bool, Server]]:
    """Both sides, served; ended afterwards."""
    found: dict[bool, Server] = {}
    try:
        for guard in SIDES:
            port = free_port()
            command = [sys.executable, "-m", "tests.bench.served", kind, str(port), str(cpu)]
            command += ["--guard"] if guard else []
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            found[guard] = Server(port, process)
        for each in found.values():
            assert each.process.stdout is not None
            if not any(line == "ready\n" for line in each.process.stdout):
                raise RuntimeError(f"a server ended with {each.process.wait()}")
        yield found
    finally:
        for each in found.values():
            each.process.communicate(timeout=STOP_TIMEOUT_S)


def measure(workload: Workload, rounds: int, seconds: float, both: dict[bool, Server]) -> dict[bool, Figures]:
    """So many rounds after one that warms up."""
    figures = {guard: Figures() for guard in SIDES}
    message = request("/v1/completions", workload.body)
    pids = tuple(each.process.pid for each in both.values())

    def once(server: Server) -> tuple[list[float], float, float]:
        times = sequential(server.port, message, workload.requests)
        before = server.cpu_s()
        done, took = saturating(server.port, message, workload.clients, seconds)
        return times, done / took, (server.cpu_s() - before) / done

    for place in range(rounds + 1):
        for guard in SIDES if place % 2 else reversed(SIDES):
            server, found = both[guard], figures[guard]
            times, rate, cpu = undisturbed(lambda server=server: once(server), pids)  # type: ignore[misc]
            if place:
                found.p50.append(statistics.median(times))
                found.p99.append(statistics.quantiles(times, n=100)[-1])
                found.rate.append(rate)
                found.cpu.append(cpu)
    return figures


def differences(bare: Sequence[float], guarded: Sequence[float]) -> list[float]:
    """Round by round."""
    return [more - less for less, more in zip(bare, guarded, strict=True)]


def told(workload: Workload, figures: dict[bool, Figures]) -> bool:
    """Print it; whether it is within the targets."""
    bare, guarded = figures[False], figures[True]
    print(f"{workload.title}; {workload.clients} clients for the throughput")
    for name, unit, factor in (("p50", "us", 1e6), ("p99", "us", 1e6), ("cpu", "us", 1e6), ("rate", "/s", 1.0)):
        one, other = getattr(bare, name), getattr(guarded, name)
        changed = [factor * each for each in differences(one, other)]
        print(
            f"  {name:<5} alone {factor * statistics.median(one):9.1f}"
            f"  guarded {factor * statistics.median(other):9.1f}"
            f"  difference {statistics.median(changed):+8.1f} ({min(changed):+.1f} to {max(changed):+.1f}) {unit}"
        )
    lost = [1 - more / less for less, more in zip(bare.rate, guarded.rate, strict=True)]
    print(f"  throughput lost {statistics.median(lost):.1%} ({min(lost):.1%} to {max(lost):.1%})", flush=True)
    added = statistics.median(differences(bare.p50, guarded.p50))
    return added <= MOST_ADDED_S and statistics.median(lost) <= workload.most_lost


def main() -> int:
    """0 where everything is within the targets."""
    parser = argparse.ArgumentParser(prog="tests.bench.guard", description="guard against no guard")
    parser.add_argument("-n", "--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each throughput")
    parser.add_argument("--only", default="", help="workloads whose title begins so")
    arguments = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        print("bench-guard: needs two processors, one for the servers and one for the clients", file=sys.stderr)
        return 1
    os.sched_setaffinity(0, {cpus[1]})
    passed = True
    for workload in WORKLOADS:
        if not workload.title.startswith(arguments.only):
            continue
        with servers(workload.kind, cpus[0]) as both:
            try:
                passed &= told(workload, measure(workload, arguments.rounds, arguments.seconds, both))
            except DisturbedError as error:
                print(f"bench-guard: {error}", file=sys.stderr)
                return 1
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
