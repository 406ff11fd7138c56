"""A load generator of few microseconds a request: requests made beforehand, sockets, and one epoll loop.

Its own cost is the same for both sides of a comparison, and small beside a server's.
"""

import select
import socket
import time
from dataclasses import dataclass, field

_LARGEST_READ = 1 << 16
_END_OF_HEAD = b"\r\n\r\n"
_END_OF_CHUNKS = b"0\r\n\r\n"
_LENGTH = b"content-length:"
TIMEOUT_S = 30.0


class AnswerError(Exception):
    """A server answered by anything but 200, or not at all."""


def request(path: str, body: bytes) -> bytes:
    """A POST of JSON over a connection that stays."""
    head = f"POST {path} HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def is_whole(answer: bytes) -> bool:
    """Whether all of an answer has come. Raises AnswerError."""
    end = answer.find(_END_OF_HEAD)
    if end < 0:
        return False
    head = answer[:end].lower()
    if not head.startswith(b"http/1.1 200 "):
        raise AnswerError(answer.decode(errors="replace"))
    place = head.find(_LENGTH)
    if place < 0:
        return answer.endswith(_END_OF_CHUNKS)
    length = int(head[place + len(_LENGTH) :].split(b"\r\n", 1)[0])
    return len(answer) >= end + len(_END_OF_HEAD) + length


@dataclass(eq=False)
class Connection:
    """One client, which asks again as soon as it is answered."""

    port: int
    asked: float = 0.0
    answer: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, message: bytes) -> None:
        """Send the next request."""
        self.answer.clear()
        self.asked = time.perf_counter()
        self.socket.sendall(message)

    def read(self) -> bool:
        """Whether the answer is whole."""
        part = self.socket.recv(_LARGEST_READ)
        if not part:
            raise AnswerError(f"the server closed the connection after {bytes(self.answer)!r}")
        self.answer += part
        return is_whole(bytes(self.answer))


def sequential(port: int, message: bytes, count: int) -> list[float]:
    """Seconds of each of so many requests, one after the other."""
    one, seconds = Connection(port), []
    for _ in range(count):
        one.ask(message)
        while not one.read():
            pass
        seconds.append(time.perf_counter() - one.asked)
    one.socket.close()
    return seconds


def saturating(port: int, message: bytes, connections: int, seconds: float) -> tuple[int, float]:
    """Answers that so many clients get who each ask again at once, and the seconds that it took."""
    clients = {each.socket.fileno(): each for each in (Connection(port) for _ in range(connections))}
    poll, done = select.epoll(), 0
    for number, each in clients.items():
        poll.register(number, select.EPOLLIN)
        each.ask(message)
    began = time.perf_counter()
    until = began + seconds
    while (now := time.perf_counter()) < until:
        ready = poll.poll(TIMEOUT_S)
        if not ready:
            raise AnswerError(f"no answer within {TIMEOUT_S:g} s")
        for number, _ in ready:
            if clients[number].read():
                done += 1
                clients[number].ask(message)
    poll.close()
    for each in clients.values():
        each.socket.close()
    return done, now - began
