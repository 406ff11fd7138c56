"""Two ranks of gloo in one process, each at an address of its own: `python -m tests.vllm.listeners ADDRESS ADDRESS`.

Prints where they listen, as a list of JSON.
"""

import json
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rollfleet_transport.gloo import group_of

TIMEOUT = timedelta(seconds=20)
LISTENING = "0A"  # of /proc/net/tcp


def listening(but: int) -> list[str]:
    """Addresses at which this process listens, without that port's."""
    inodes = {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    found = set()
    for line in Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        words = line.split()
        address, port = words[1].split(":")
        if words[3] == LISTENING and int(port, 16) != but and f"socket:[{words[9]}]" in inodes:
            found.add(socket.inet_ntoa(bytes.fromhex(address)[::-1]))
    return sorted(found)


def main(addresses: list[str]) -> None:
    """The addresses of rank 0, 1, ..."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
    groups: dict[int, Any] = {}

    def form(rank: int) -> None:
        mine = store.clone()
        groups[rank] = group_of(mine, rank, len(addresses), TIMEOUT, addresses[rank])

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(len(addresses))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    print(json.dumps(listening(store.port)), flush=True)
    os._exit(0 if len(groups) == len(addresses) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
