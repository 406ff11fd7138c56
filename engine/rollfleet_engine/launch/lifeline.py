"""While an engine of several pods runs: whoever of them ends, all end, and start anew as one.

vLLM itself tells the leading pod nothing of workers that died elsewhere: it goes on saying that it is well, and the
next request is lost with it (seen with 0.27.1). A pod that hears of an end, or nothing for SILENCE_S, ends its engine.
A pod that is told to stop says that it leaves and runs on: the leader drains first, and its end is the word for all.
"""

import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping

from rollfleet_engine.launch.lines import HEARTBEAT_S, LONGEST_TEXT, SILENCE_S, Kind, Line, Message

END_S = 2.0  # that the last words of another pod are waited for


class Lifeline:
    """The connections of one pod to the others of its engine, watched by a thread.

    `fileno` becomes readable when `lost` or `leaving` has changed.
    """

    def __init__(self, lines: Mapping[int, Line], clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = dict(lines)
        self._clock = clock
        self._news_read, self._news_write = os.pipe()
        self._end_read, self._end_write = os.pipe()
        for end in (self._news_read, self._news_write):
            os.set_blocking(end, False)
        self._over = threading.Event()
        self.lost = ""  # which node is lost, and its last words
        self.leaving = ""  # which node was told to stop
        self._thread = threading.Thread(target=self._watch, name="rollfleet-lifeline", daemon=True)

    def start(self) -> None:
        """From now on nothing of the others is missed."""
        self._thread.start()

    def fileno(self) -> int:
        """For a selector."""
        return self._news_read

    def heard(self) -> None:
        """The news are taken: `fileno` is not readable any more until there are others."""
        try:
            os.read(self._news_read, 4096)
        except BlockingIOError:
            return

    def tell(self) -> None:
        """Make `fileno` readable."""
        try:
            os.write(self._news_write, b"\0")
        except BlockingIOError:  # there are news already
            return

    def leave(self) -> None:
        """Say that this pod was told to stop."""
        for line in self._lines.values():
            line.send(Message(kind=Kind.LEAVING))

    def last_words(self) -> str:
        """Of a node that was lost: where several pods fail for one cause, its own text is often the better one."""
        self._over.wait(END_S)
        return self.lost

    def end(self, why: str) -> None:
        """Tell the others, and close."""
        os.write(self._end_write, b"\0")
        self._thread.join(END_S)
        for line in self._lines.values():
            line.send(Message(kind=Kind.END, text=why[:LONGEST_TEXT]))
            line.close()

    def _watch(self) -> None:
        alive_by = self._clock() + HEARTBEAT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._end_read, selectors.EVENT_READ)
            for node, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, node)
            while not self.lost:
                ready = [key for key, _ in selector.select(max(0.0, alive_by - self._clock()))]
                if any(key.fileobj == self._end_read for key in ready):
                    return
                for key in ready:
                    self._take(key.data)
                if self._clock() >= alive_by:
                    alive_by = self._clock() + HEARTBEAT_S
                    self._beat()
        self._over.set()

    def _take(self, node: int) -> None:
        line = self._lines[node]
        for message in line.receive(self._clock()):
            if message.kind is Kind.END:
                self._lose(node, f"ended: {message.text}" if message.text else "ended")
            elif message.kind is Kind.LEAVING and not self.leaving:
                self.leaving = f"node {node} was told to stop"
                self.tell()
        if line.ended:
            self._lose(node, line.ended)

    def _beat(self) -> None:
        for node, line in self._lines.items():
            line.send(Message(kind=Kind.ALIVE))
            if self._clock() >= line.heard + SILENCE_S:
                self._lose(node, f"has said nothing for {SILENCE_S:g} s")
            elif line.ended:
                self._lose(node, line.ended)

    def _lose(self, node: int, why: str) -> None:
        if not self.lost:
            self.lost = f"node {node} {why}"
            self.tell()
