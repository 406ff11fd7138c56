"""Whoever does not lead changes nothing: writes and commands ask at the last moment, by a monotonic clock.

What a process that was stopped between the question and the request still sends meets the other fences:
resourceVersions and uids at the API server, epochs at the guards.
"""

from collections.abc import Callable, Mapping

from rollfleet_operator.clients.errors import NotLeading
from rollfleet_operator.ports import Cluster, Listing, Manifest, Resource


class FencedCluster:
    """A Cluster that writes only while its owner leads; everybody may read."""

    def __init__(self, cluster: Cluster, leads: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._leads = leads

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest:
        """Read an object."""
        return await self._cluster.get(resource, namespace, name)

    async def list(self, resource: Resource, namespace: str | None, label_selector: str = "") -> Listing:
        """Read a collection."""
        return await self._cluster.list(resource, namespace, label_selector)

    async def list_metadata(self, resource: Resource, namespace: str | None, label_selector: str = "") -> Listing:
        """Read the metadata of a collection."""
        return await self._cluster.list_metadata(resource, namespace, label_selector)

    async def served(self, api_version: str) -> Mapping[str, frozenset[str]]:
        """Verbs by resource name."""
        return await self._cluster.served(api_version)

    async def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, subresource: tuple[str, str] | None = None
    ) -> Manifest:
        """Create an object, or post to (name, subresource)."""
        demand(self._leads)
        return await self._cluster.create(resource, namespace, manifest, subresource)

    async def apply(self, resource: Resource, namespace: str, manifest: Manifest) -> Manifest:
        """Server-side apply."""
        demand(self._leads)
        return await self._cluster.apply(resource, namespace, manifest)

    async def replace_status(self, resource: Resource, manifest: Manifest) -> Manifest:
        """Replace the status subresource."""
        demand(self._leads)
        return await self._cluster.replace_status(resource, manifest)

    async def merge_patch(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> Manifest:
        """JSON merge patch."""
        demand(self._leads)
        return await self._cluster.merge_patch(resource, namespace, name, patch)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str | None = None) -> Manifest:
        """Delete an object."""
        demand(self._leads)
        return await self._cluster.delete(resource, namespace, name, uid)


def demand(leads: Callable[[], bool]) -> None:
    """Raise NotLeading unless the owner leads."""
    if not leads():
        raise NotLeading("this process does not lead (any more): another one acts, or will")
