"""kubectl as a function: every call has a deadline, and an error carries kubectl's own words."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any


class KubectlError(RuntimeError):
    """kubectl failed; the message is what it said."""


async def kubectl(*args: str, manifest: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> str:
    """Run kubectl and return what it printed. `manifest` goes to its standard input as JSON (for `-f -`)."""
    process = await asyncio.create_subprocess_exec(
        "kubectl",
        *args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    data = json.dumps(manifest).encode() if manifest is not None else None
    try:
        out, err = await asyncio.wait_for(process.communicate(data), timeout_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise KubectlError(f"kubectl {' '.join(args)}: no answer within {timeout_s} s") from None
    if process.returncode != 0:
        raise KubectlError(f"kubectl {' '.join(args)}: {err.decode().strip()}")
    return out.decode()


async def get(kind: str, name: str, namespace: str) -> dict[str, Any]:
    """One object."""
    document: dict[str, Any] = json.loads(await kubectl("get", kind, name, "-n", namespace, "-o", "json"))
    return document


async def apply(manifest: Mapping[str, Any]) -> None:
    """`kubectl apply` of one object (or a List)."""
    await kubectl("apply", "-f", "-", manifest=manifest)


async def until(
    kind: str,
    name: str,
    namespace: str,
    holds: Callable[[dict[str, Any]], bool],
    timeout_s: float,
    interval_s: float = 0.25,
) -> dict[str, Any]:
    """Poll an object until `holds`; TimeoutError shows its last status."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    document: dict[str, Any] = {}
    while loop.time() < deadline:
        document = await get(kind, name, namespace)
        if holds(document):
            return document
        await asyncio.sleep(interval_s)
    status = json.dumps(document.get("status"), indent=1)[:4000]
    raise TimeoutError(f"{kind}/{name} did not get there within {timeout_s} s; its status: {status}")
