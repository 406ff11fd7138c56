"""Looks after the engine's process as PID 1: passes its output and exit code on, forwards signals, reaps children."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from rollfleet_engine.launch.causes import CauseFinder
from rollfleet_engine.launch.lifeline import Lifeline
from rollfleet_engine.launch.plan import Plan

# preStop has drained before SIGTERM comes, and the pod's grace period is the drain's time and 30 s: what is left is
# enough for this and for the kill of what did not end.
STOP_GRACE_S = 20.0
_KILL_GRACE_S = 5.0
_LOST_GRACE_S = 5.0  # of an engine that lacks a node: nothing that it still does counts
_LEFTOVER_GRACE_S = 3.0  # for what was killed to be gone, and for its last output
_LOOP_S = 1.0
_READ_BYTES = 65536
_LONGEST_LINE = 65536
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

STOPPING = frozenset({signal.SIGTERM, signal.SIGINT})
FORWARDED = frozenset({signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH})
WAITED = STOPPING | FORWARDED | {signal.SIGCHLD}


@dataclass(frozen=True)
class Outcome:
    """How the engine ended."""

    exit_code: int  # as a shell would say it: 128 + signal where a signal ended it
    signal_name: str = ""
    asked_to_stop: bool = False
    killed_after_grace: bool = False
    lost: str = ""  # the other node of the engine that it was ended for, and why


@dataclass(frozen=True)
class Bond:
    """What an engine of several pods has besides: it ends with the others, and they with it."""

    lifeline: Lifeline
    leads: bool
    drain_s: float  # that the leader may take to drain, once a pod is told to stop
    drain: Callable[[], object]  # closes the gate, returns when nothing is in flight; for the leader


class SignalPipe:
    """Signals as they come, in the main thread.

    Not sigtimedwait: stopped (SIGSTOP) for longer than its timeout and continued, CPython 3.11 makes a signal up from
    memory that nobody has written to (Modules/signalmodule.c leaves its loop without an answer).
    """

    def __init__(self, numbers: Collection[signal.Signals]) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, _noted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def fileno(self) -> int:
        """For a selector."""
        return self._read

    def wait(self, seconds: float, *others: int) -> bytes:
        """Numbers of the signals that came, at the latest after so long, or when one of the others can be read."""
        ready, _, _ = select.select([self._read, *others], [], [], seconds)
        return os.read(self._read, _READ_BYTES) if self._read in ready else b""


def _noted(number: int, frame: object) -> None:
    """The number is in the pipe already."""


class Supervisor:
    """One engine process and everything that it leaves behind."""

    def __init__(
        self,
        plan: Plan,
        environ: dict[str, str],
        finder: CauseFinder,
        grace_s: float = STOP_GRACE_S,
        bond: Bond | None = None,
        signals: SignalPipe | None = None,
    ) -> None:
        self._plan = plan
        self._bond = bond
        self._own_signals = signals
        self._lost = ""
        self._asked = False
        self._leave_by: float | None = None  # monotonic; that the leader's end is waited for
        self._drainer: threading.Thread | None = None
        kept = {name: value for name, value in environ.items() if name not in plan.unset}
        self._environ = kept | dict(plan.env)
        self._finder = finder
        self._finder_lock = threading.Lock()
        self._grace_s = grace_s
        self._pid = 0
        self._stop_by: float | None = None  # monotonic; None until somebody asked
        self._killed = False
        self._childless = False

    def run(self) -> Outcome:
        """Start the engine and stay until it has ended. To be called from the main thread, once."""
        self._signals = self._own_signals or SignalPipe(WAITED)
        adopt_orphans()
        pumps = self._start()
        status = self._wait()
        self._clean_up(pumps)
        return self._outcome(status)

    def _start(self) -> list[threading.Thread]:
        pipes = [os.pipe(), os.pipe()]
        actions = [(os.POSIX_SPAWN_DUP2, write, 1 + index) for index, (_, write) in enumerate(pipes)]
        # A group of its own, so that the engine's workers can be ended with it. Whatever mask and handlers we were
        # started with must not be inherited, or the engine would never see a SIGTERM.
        self._pid = os.posix_spawnp(
            self._plan.argv[0],
            self._plan.argv,
            self._environ,
            file_actions=actions,
            setpgroup=0,
            setsigmask=(),
            setsigdef=WAITED,
        )
        for _, write in pipes:
            os.close(write)
        sinks = (sys.stdout.fileno(), sys.stderr.fileno())
        pumps = [
            threading.Thread(target=self._pump, args=(read, sink), daemon=True)
            for (read, _), sink in zip(pipes, sinks, strict=True)
        ]
        for pump in pumps:
            pump.start()
        return pumps

    def _pump(self, source: int, sink: int) -> None:
        """Pass one stream on. A sink that has gone must not stop the engine: its output is then read and dropped."""

        def take(line: bytes) -> None:
            with self._finder_lock:
                self._finder.feed(line.decode(errors="replace"), time.monotonic(), str(sink))

        open_sink = True
        for line in read_lines(lambda: os.read(source, _READ_BYTES)):
            take(line.rstrip(b"\r\n"))
            open_sink = open_sink and write_all(sink, line)
        os.close(source)

    def _wait(self) -> int:
        """The engine's wait status."""
        while True:
            bonds = () if self._bond is None else (self._bond.lifeline.fileno(),)
            for number in self._signals.wait(self._patience_s(), *bonds):
                if number != signal.SIGCHLD:
                    self._receive(signal.Signals(number))
            if (status := self._reap()) is not None:
                return status
            if self._bond is not None:
                self._heed(self._bond)
            if self._stop_by is not None and time.monotonic() >= self._stop_by:
                self._kill_group()

    def _patience_s(self) -> float:
        # Signals of one kind may merge, so that children are also looked for without one.
        if self._stop_by is None:
            return _LOOP_S
        return min(_LOOP_S, max(0.0, self._stop_by - time.monotonic()))

    def _receive(self, number: signal.Signals) -> None:
        if number not in STOPPING:
            os.kill(self._pid, number)
            return
        self._asked = True
        if self._bond is None or self._bond.leads:
            self._stop(self._grace_s)
        elif self._leave_by is None:
            self._leave_by = time.monotonic() + self._bond.drain_s
            self._bond.lifeline.leave()

    def _stop(self, grace_s: float) -> None:
        if self._stop_by is None:
            self._stop_by = time.monotonic() + grace_s
            os.kill(self._pid, signal.SIGTERM)

    def _heed(self, bond: Bond) -> None:
        """What the other nodes of the engine say."""
        lifeline = bond.lifeline
        lifeline.heard()
        if lifeline.lost and self._stop_by is None:
            self._lost = lifeline.lost
            self._stop(_LOST_GRACE_S)
        elif lifeline.leaving and bond.leads:
            self._drain(bond)
        if self._leave_by is not None and time.monotonic() >= self._leave_by:
            self._stop(_LOST_GRACE_S)

    def _drain(self, bond: Bond) -> None:
        """As the kubelet's preStop hook does of this pod: a node that goes takes the whole engine along."""
        if self._drainer is None:

            def work() -> None:
                bond.drain()
                bond.lifeline.tell()

            self._drainer = threading.Thread(target=work, name="rollfleet-drain", daemon=True)
            self._drainer.start()
        elif not self._drainer.is_alive() and self._stop_by is None:
            self._lost = bond.lifeline.leaving
            self._stop(self._grace_s)

    def _kill_group(self) -> None:
        self._killed = True
        self._stop_by = time.monotonic() + _KILL_GRACE_S  # again, should one have been forked meanwhile
        kill_group(self._pid)

    def _reap(self) -> int | None:
        """Collect every child that has ended; the engine's status if it is among them."""
        engine: int | None = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return engine
            if pid == 0:
                return engine
            if pid == self._pid:
                engine = status

    def _clean_up(self, pumps: list[threading.Thread]) -> None:
        """End what the engine left running: workers hold its ports, its memory and our pipes."""
        kill_group(self._pid)
        deadline = time.monotonic() + _LEFTOVER_GRACE_S
        while not self._childless and (left_s := deadline - time.monotonic()) > 0:
            self._signals.wait(min(_LOOP_S, left_s))
            self._reap()
        for pump in pumps:
            pump.join(max(0.0, deadline - time.monotonic()))

    def _outcome(self, status: int) -> Outcome:
        code = os.waitstatus_to_exitcode(status)
        return Outcome(
            exit_code=code if code >= 0 else 128 - code,
            signal_name=signal.Signals(-code).name if code < 0 else "",
            asked_to_stop=self._asked,
            lost=self._lost,
            killed_after_grace=self._killed,
        )


def adopt_orphans() -> None:
    """Become the parent of what the engine's children leave behind, as PID 1 is anyway."""
    if os.getpid() != 1:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_group(pid: int) -> None:
    """SIGKILL to a process group, if any of it still lives."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def read_lines(read: Callable[[], bytes]) -> Iterator[bytes]:
    """Lines with their newline; one longer than the bound comes in pieces, so that memory stays bounded."""
    rest = b""
    while chunk := read():
        *lines, rest = (rest + chunk).splitlines(keepends=True) or [b""]
        if rest.endswith(b"\n") or len(rest) >= _LONGEST_LINE:
            lines.append(rest)
            rest = b""
        yield from lines
    if rest:
        yield rest


def write_all(sink: int, data: bytes) -> bool:
    """Whether the sink still takes data."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(sink, view) :]
        except OSError:
            return False
    return True
