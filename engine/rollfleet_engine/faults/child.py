"""The engine behind the proxy: a child with all that it started, to be killed, stopped and started anew."""

import asyncio
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rollfleet_engine.guard.log import GuardLog

KILL_S = 10.0
STOP_S = 40.0  # of an orderly end: the launcher gives its engine 20 s
_LOOK_S = 0.02
_SESSION_FIELD = 3  # of /proc/<pid>/stat after the name: state, parent, group, session (proc(5))


class Child:
    """One engine at a time. Keeps Hands."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: GuardLog) -> None:
        self._command = command
        self._environ = environ
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._continues: asyncio.TimerHandle | None = None
        self._moving = asyncio.Lock()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # by itself; its exit code

    async def start(self) -> None:
        """Start the engine. Raises OSError."""
        # A session of its own: by that its descendants are known, whatever groups they make.
        process = await asyncio.create_subprocess_exec(*self._command, env=dict(self._environ), start_new_session=True)
        self._process = process
        self._watching = asyncio.create_task(self._watch(process), name="faults-engine")
        self._log.write("faults.engine_started", pid=process.pid)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if not self.ended.done():
            self.ended.set_result(_shell_code(code))

    async def die(self) -> None:
        """kill -9, and it stays dead."""
        async with self._moving:
            await self._kill()

    async def restart(self) -> None:
        """Killed and started anew; it comes up with the weights of model.path."""
        async with self._moving:
            await self._kill()
            await self.start()

    async def _kill(self) -> None:
        process = self._process
        if process is None:
            return
        if self._watching is not None:
            self._watching.cancel()  # its end is our doing
        if self._continues is not None:
            self._continues.cancel()
        seen: set[int] = set()
        async with asyncio.timeout(KILL_S):
            while living := members(process.pid):
                seen.update(living)
                _signal(living, signal.SIGKILL)
                await asyncio.sleep(_LOOK_S)
            await process.wait()
        _reap(seen - {process.pid})
        self._process = None
        self._log.write("faults.engine_killed", pid=process.pid, processes=len(seen))

    async def hang(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        self._signal_all(signal.SIGSTOP)
        if self._continues is not None:
            self._continues.cancel()
        self._continues = asyncio.get_running_loop().call_later(seconds, self._signal_all, signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        if self._process is not None:
            _signal(members(self._process.pid), number)

    async def stop(self) -> int:
        """An orderly end, as the kubelet asks for it; its exit code."""
        async with self._moving:
            process = self._process
            if process is None:
                return 0
            self._signal_all(signal.SIGCONT)
            _signal([process.pid], signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    code = await process.wait()
            except TimeoutError:
                code = -signal.SIGKILL
            await self._kill()
            return _shell_code(code)


def _shell_code(code: int) -> int:
    """128 + signal where a signal ended it."""
    return code if code >= 0 else 128 - code


def members(session: int) -> list[int]:
    """Processes of a session, but for those that have ended."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_of(entry, session)]


def _is_of(entry: Path, session: int) -> bool:
    try:
        state, *fields = (entry / "stat").read_text().rpartition(")")[2].split()
        # The first thread of a process that is killed ends before the others, which still hold its ports.
        ended = state == "Z" and len(list((entry / "task").iterdir())) <= 1
    except OSError:  # it has ended meanwhile
        return False
    return not ended and int(fields[_SESSION_FIELD - 1]) == session


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _reap(pids: Iterable[int]) -> None:
    """Those that have become ours with the death of their parent."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
