"""Ports for servers under test."""

import socket


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
