"""Objects behind the trainer's ApiServer, for tests of single parts; the integration tests use the real one.

It has what the trainer relies on: resourceVersion as precondition, generation, watches of one object, TokenRequest.
Tests play the operator by `put_status` and `change`. All of it runs in the loop of whoever calls, but for `put_status`
and `change`, which may be called from any thread.
"""

import asyncio
import copy
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from rollfleet_trainer.apiserver import API, LEASES_API, path_of
from rollfleet_trainer.errors import ApiServerError, ConflictError, NotFoundError

Manifest = dict[str, Any]
REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
NAMESPACE, FLEET = "rl", "qwen"
ENGINE_PATH = path_of(API, NAMESPACE, "rolloutengines", FLEET)
ENGINES_PATH = path_of(API, NAMESPACE, "rolloutengines")
VERSIONS_PATH = path_of(API, NAMESPACE, "weightversions")
LEASE_PATH = path_of(LEASES_API, NAMESPACE, "leases", f"{FLEET}-sender")
POLICY_PATH = f"{VERSIONS_PATH}/{FLEET}-policy"


class MemoryApi:
    """Keeps ApiServer's methods."""

    def __init__(self) -> None:
        self.objects: dict[str, Manifest] = {}
        self.failing: Callable[[str, str], ApiServerError | None] = lambda _method, _path: None
        self.username = "kubernetes-admin"
        self.audiences: list[str] = []  # of tokens that were asked for
        self.token: Callable[[str], str] = lambda audience: f"token for {audience}"
        self.requests: list[tuple[str, str]] = []
        self._versions = itertools.count(1)
        self._lock = threading.RLock()
        self._watching: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Queue[Manifest | None]]] = []

    async def close(self) -> None:
        """Nothing is open."""

    async def get(self, path: str) -> Manifest:
        self._told("GET", path)
        with self._lock:
            if path in self.objects:
                return copy.deepcopy(self.objects[path])
            if path in (ENGINES_PATH, VERSIONS_PATH):
                items = [each for name, each in self.objects.items() if name.startswith(f"{path}/")]
                return {"items": copy.deepcopy(items)}
        raise NotFoundError(f"GET {path}: not found (HTTP 404)")

    async def create(self, path: str, manifest: Manifest) -> Manifest:
        self._told("POST", path)
        if path == REVIEWS:
            return {"status": {"userInfo": {"username": self.username}}}
        if path.endswith("/token"):
            [audience] = manifest["spec"]["audiences"]
            self.audiences.append(audience)
            return {"status": {"token": self.token(audience)}}
        with self._lock:
            where = f"{path}/{manifest['metadata']['name']}"
            if where in self.objects:
                raise ConflictError(f"POST {path}: already exists (HTTP 409)")
            return self.put(where, manifest)

    async def patch(self, path: str, patch: Manifest, deadline_s: float = 10.0) -> Manifest:
        self._told("PATCH", path)
        with self._lock:
            if path not in self.objects:
                raise NotFoundError(f"PATCH {path}: not found (HTTP 404)")
            metadata = self.objects[path]["metadata"]
            for name in ("resourceVersion", "uid"):
                if patch.get("metadata", {}).get(name, metadata[name]) != metadata[name]:
                    raise ConflictError(f"PATCH {path}: the object has been modified (HTTP 409)")
            return self.put(path, merged(self.objects[path], patch))

    async def require_watch(self, path: str, name: str) -> None:
        self._told("WATCH", f"{path}/{name}")

    async def watch(self, path: str, name: str, resource_version: str) -> AsyncIterator[Manifest]:
        self._told("WATCH", f"{path}/{name}")
        where, queue = f"{path}/{name}", asyncio.Queue[Manifest | None]()
        entry = (where, asyncio.get_running_loop(), queue)
        with self._lock:
            self._watching.append(entry)
            if self.objects[where]["metadata"]["resourceVersion"] != resource_version:
                queue.put_nowait(copy.deepcopy(self.objects[where]))
        try:
            while True:
                news = await queue.get()
                if news is None:
                    return
                yield news
        finally:
            self._watching.remove(entry)

    def _told(self, method: str, path: str) -> None:
        self.requests.append((method, path))
        if (error := self.failing(method, path)) is not None:
            raise error

    # --- what the API server and others do

    def put(self, path: str, manifest: Manifest) -> Manifest:
        """As the API server stores it."""
        with self._lock:
            stored, before = copy.deepcopy(manifest), self.objects.get(path)
            metadata = stored["metadata"]
            changed = before is None or before.get("spec") != stored.get("spec")
            metadata["generation"] = (before["metadata"]["generation"] if before else 0) + int(changed)
            metadata.setdefault("uid", f"uid-{metadata['name']}")
            metadata.setdefault("creationTimestamp", "2026-11-30T00:00:00Z")
            metadata["resourceVersion"] = str(next(self._versions))
            self.objects[path] = stored
            for where, loop, queue in self._watching:
                if where == path:
                    loop.call_soon_threadsafe(queue.put_nowait, copy.deepcopy(stored))
            return copy.deepcopy(stored)

    def end_watches(self) -> None:
        """As the API server does after a while."""
        with self._lock:
            for _, loop, queue in self._watching:
                loop.call_soon_threadsafe(queue.put_nowait, None)

    def change(self, path: str, patch: Manifest) -> Manifest:
        """What somebody else writes."""
        with self._lock:
            return self.put(path, merged(self.objects[path], patch))

    def put_status(self, path: str, **status: Any) -> None:
        """What the operator says of the newest spec."""
        with self._lock:
            stored = self.objects[path]
            known = {"observedGeneration": stored["metadata"]["generation"], "version": stored["spec"]["version"]}
            self.put(path, {**stored, "status": {**(stored.get("status") or {}), **known, **status}})


def fleet(**spec: Any) -> MemoryApi:
    """An API server with one fleet and its Lease, as the operator made it."""
    api = MemoryApi()
    engine = {
        "metadata": {"namespace": NAMESPACE, "name": FLEET, "uid": "f1e2-fleet"},
        "spec": {"trainers": [{"serviceAccountName": "grpo"}], "weightTransfer": {"backend": "gloo"}, **spec},
        "status": {"committed": {"version": 0}},
    }
    api.put(ENGINE_PATH, engine)
    api.put(LEASE_PATH, {"metadata": {"namespace": NAMESPACE, "name": f"{FLEET}-sender"}, "spec": {}})
    return api


def conditions(**holds: bool | str) -> list[Manifest]:
    """metav1.Conditions: True, False, or False with a text "Reason: message"."""
    return [
        {
            "type": kind,
            "status": "True" if claim is True else "False",
            "reason": claim.partition(": ")[0] if isinstance(claim, str) else kind,
            "message": claim.partition(": ")[2] if isinstance(claim, str) else "",
        }
        for kind, claim in holds.items()
    ]


def merged(stored: Any, patch: Any) -> Any:
    """JSON merge patch, RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(stored) if isinstance(stored, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result
