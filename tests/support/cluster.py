"""A tiny stand-in of the API server for unit tests of single clients; the integration tests use the real one."""

from collections.abc import Mapping
from typing import Any

from rollfleet_operator.clients.errors import AlreadyExists, NotFound
from rollfleet_operator.ports import Listing, Manifest, Resource


class MemoryCluster:
    """Keeps objects by (plural, namespace, name), and every call that wrote."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Manifest] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.answers: list[Manifest | Exception] = []  # for posts to a subresource, in order

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest:
        try:
            return self.objects[resource.plural, namespace or "", name]
        except KeyError as error:
            raise NotFound(f"{resource.kind} {name}") from error

    async def list(self, resource: Resource, namespace: str | None, label_selector: str = "") -> Listing:
        found = [
            item for (plural, where, _), item in self.objects.items() if (plural, where) == (resource.plural, namespace)
        ]
        return Listing(tuple(found), "1")

    async def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, subresource: tuple[str, str] | None = None
    ) -> Manifest:
        name = subresource[0] if subresource else manifest["metadata"]["name"]
        self.writes.append(("create", resource.plural, name))
        if subresource:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if (resource.plural, namespace or "", name) in self.objects:
            raise AlreadyExists(f"{resource.kind} {name}")
        return self._put(resource, namespace or "", manifest)

    async def apply(self, resource: Resource, namespace: str, manifest: Manifest) -> Manifest:
        self.writes.append(("apply", resource.plural, manifest["metadata"]["name"]))
        return self._put(resource, namespace, manifest)

    async def replace_status(self, resource: Resource, manifest: Manifest) -> Manifest:
        raise AssertionError("no status is written in these tests")

    async def merge_patch(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> Manifest:
        raise AssertionError("nothing is patched in these tests")

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str | None = None) -> Manifest:
        raise AssertionError("nothing is deleted in these tests")

    async def served(self, api_version: str) -> Mapping[str, frozenset[str]]:
        return {}

    def _put(self, resource: Resource, namespace: str, manifest: Manifest) -> Manifest:
        self.objects[resource.plural, namespace, manifest["metadata"]["name"]] = manifest
        return manifest


class SilentMeter:
    """Counts nothing."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_arguments: None
