"""Forming a group of gloo: every rank listens where the others reach it.

torch by itself lets a rank listen at what its host's name resolves to, and tells the others that address. That is
loopback on hosts as Debian sets them up (127.0.1.1), in a pod of the host's network as in a trainer outside Kubernetes:
ranks on other machines, or in other network namespaces, then cannot connect.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch.distributed as dist

CHOSEN = "GLOO_SOCKET_IFNAME"  # torch's own variable: who sets it has chosen
THREADS = 2  # of one device, as torch takes


def group_of(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """A ProcessGroupGloo that listens at `address` where that is one of this machine, else where torch would.

    Blocks until all ranks are there; RuntimeError after `timeout`.
    """
    if CHOSEN in os.environ or not _is_own(address):
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._threads = THREADS
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to another, which is sent nothing. OSError where there is no way."""
    (family, kind, protocol, _, there), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with closing(socket.socket(family, kind, protocol)) as one:
        one.connect(there)
        return str(one.getsockname()[0])


def _is_own(address: str) -> bool:
    """A name or address that a socket of this machine can be bound to."""
    try:
        (family, kind, protocol, _, here), *_ = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        with closing(socket.socket(family, kind, protocol)) as one:
            one.bind(here)
    except OSError:
        return False
    return True
