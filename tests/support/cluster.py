"""A tiny stand-in of the API server for unit tests of single parts; the integration tests use the real one."""

import copy
from collections.abc import Mapping
from typing import Any

from rollfleet_operator.clients.errors import AlreadyExists, Conflict, NotFound, RollfleetError
from rollfleet_operator.ports import Listing, Manifest, Resource


class MemoryCluster:
    """Keeps objects by (plural, namespace, name) with a resourceVersion, and every call that wrote or tried to."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Manifest] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.answers: list[Manifest | Exception] = []  # for posts to a subresource, in order
        self.failures: dict[tuple[str, str], RollfleetError] = {}  # by (verb, name)
        self._revision = 0

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest:
        try:
            return copy.deepcopy(self.objects[resource.plural, namespace or "", name])
        except KeyError as error:
            raise NotFound(f"{resource.kind} {name}") from error

    async def list(self, resource: Resource, namespace: str | None, label_selector: str = "") -> Listing:
        found = [
            copy.deepcopy(item)
            for (plural, where, _), item in self.objects.items()
            if plural == resource.plural and namespace in (None, where)
        ]
        return Listing(tuple(found), str(self._revision))

    async def list_metadata(self, resource: Resource, namespace: str | None, label_selector: str = "") -> Listing:
        found = await self.list(resource, namespace, label_selector)
        return Listing(tuple({"metadata": item["metadata"]} for item in found.items), found.resource_version)

    async def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, subresource: tuple[str, str] | None = None
    ) -> Manifest:
        name = subresource[0] if subresource else manifest["metadata"]["name"]
        self._attempt("create", resource, name)
        if subresource:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if (resource.plural, namespace or "", name) in self.objects:
            raise AlreadyExists(f"{resource.kind} {name}")
        return self.put(resource, namespace or "", manifest)

    async def apply(self, resource: Resource, namespace: str, manifest: Manifest) -> Manifest:
        self._attempt("apply", resource, manifest["metadata"]["name"])
        return self.put(resource, namespace, manifest)

    async def replace_status(self, resource: Resource, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        self._attempt("status", resource, metadata["name"])
        stored = await self.get(resource, metadata["namespace"], metadata["name"])
        if stored["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise Conflict(f"{resource.kind} {metadata['name']}: the object has been modified")
        return self.put(resource, metadata["namespace"], stored | {"status": manifest["status"]})

    async def merge_patch(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> Manifest:
        self._attempt("patch", resource, name)
        stored = await self.get(resource, namespace, name)
        for precondition in ("uid", "resourceVersion"):
            given = patch.get("metadata", {}).get(precondition)
            if given is not None and given != stored["metadata"].get(precondition):
                raise Conflict(f"{resource.kind} {name}: the {precondition} in the precondition does not match")
        return self.put(resource, namespace, _merged(stored, patch))

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str | None = None) -> Manifest:
        self._attempt("delete", resource, name)
        stored = await self.get(resource, namespace, name)
        if uid is not None and stored["metadata"].get("uid") != uid:
            raise Conflict(f"{resource.kind} {name}: the uid in the precondition does not match")
        del self.objects[resource.plural, namespace, name]
        return {"kind": "Status"}

    async def served(self, api_version: str) -> Mapping[str, frozenset[str]]:
        return {}

    def put(self, resource: Resource, namespace: str, manifest: Manifest) -> Manifest:
        """Store an object under the next resourceVersion."""
        self._revision += 1
        stored = copy.deepcopy(manifest)
        stored["metadata"] = {**stored["metadata"], "resourceVersion": str(self._revision)}
        self.objects[resource.plural, namespace, stored["metadata"]["name"]] = stored
        return copy.deepcopy(stored)

    def _attempt(self, verb: str, resource: Resource, name: str) -> None:
        self.writes.append((verb, resource.plural, name))
        if (verb, name) in self.failures:
            raise self.failures[verb, name]


def _merged(stored: Any, patch: Any) -> Any:
    """JSON merge patch, RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(stored) if isinstance(stored, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), value)
    return result


class SilentMeter:
    """Counts nothing."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_arguments: None
