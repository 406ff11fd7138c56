"""What the runtime needs of the world, as protocols. `clients` keeps them; tests may keep them otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollfleet_operator.api.meta import API_VERSION

Manifest = dict[str, Any]  # a Kubernetes object as JSON

NAME_LENGTH = 253  # characters of an object's name at most


@dataclass(frozen=True)
class Resource:
    """A kind of object and where the API server serves it."""

    api_version: str
    kind: str
    plural: str

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path of the collection, the object or its subresource."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        parts = [root, f"namespaces/{namespace}" if namespace else "", self.plural, name or "", subresource or ""]
        return "/".join(part for part in parts if part)


ROLLOUT_ENGINES = Resource(API_VERSION, "RolloutEngine", "rolloutengines")
WEIGHT_VERSIONS = Resource(API_VERSION, "WeightVersion", "weightversions")
PODS = Resource("v1", "Pod", "pods")
SERVICES = Resource("v1", "Service", "services")
SECRETS = Resource("v1", "Secret", "secrets")
SERVICE_ACCOUNTS = Resource("v1", "ServiceAccount", "serviceaccounts")
ROLES = Resource("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
NODES = Resource("v1", "Node", "nodes")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
DEPLOYMENTS = Resource("apps/v1", "Deployment", "deployments")
LEASES = Resource("coordination.k8s.io/v1", "Lease", "leases")
EVENTS = Resource("events.k8s.io/v1", "Event", "events")
ACCESS_REVIEWS = Resource("authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews")

CHILDREN = (
    SERVICES,
    SERVICE_ACCOUNTS,
    ROLES,
    ROLE_BINDINGS,
    DEPLOYMENTS,
    NETWORK_POLICIES,
    LEASES,
)  # what decisions apply, besides pods


def child_resource(api_version: str, kind: str) -> Resource:
    """The child kind of a manifest. An unknown one is a mistake in core, not in anybody's spec."""
    for resource in CHILDREN:
        if (resource.api_version, resource.kind) == (api_version, kind):
            return resource
    raise LookupError(f"{kind} of {api_version} is not among the children that the operator applies")


@dataclass(frozen=True)
class Listing:
    """A whole list, read from the API server at one resourceVersion."""

    items: tuple[Manifest, ...]
    resource_version: str


class Cluster(Protocol):
    """The API server. Every call has a deadline and raises only errors of clients.errors."""

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest:
        """Read an object from quorum."""
        ...

    async def list(self, resource: Resource, namespace: str | None, label_selector: str = "") -> Listing:
        """Read a collection from quorum, page by page. No namespace: all of them."""
        ...

    async def list_metadata(self, resource: Resource, namespace: str | None, label_selector: str = "") -> Listing:
        """The same, of each object only its metadata."""
        ...

    async def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, subresource: tuple[str, str] | None = None
    ) -> Manifest:
        """Create an object, or post to (name, subresource)."""
        ...

    async def apply(self, resource: Resource, namespace: str, manifest: Manifest) -> Manifest:
        """Server-side apply under our field manager, with force."""
        ...

    async def replace_status(self, resource: Resource, manifest: Manifest) -> Manifest:
        """Replace the status subresource; the manifest's resourceVersion must still hold."""
        ...

    async def merge_patch(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> Manifest:
        """JSON merge patch; metadata.uid and metadata.resourceVersion in the patch are preconditions."""
        ...

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str | None = None) -> Manifest:
        """Delete an object, with the uid as precondition where given."""
        ...

    async def served(self, api_version: str) -> Mapping[str, frozenset[str]]:
        """Verbs by resource name ("pods", "pods/status") that the API server serves for a version."""
        ...


class Meter(Protocol):
    """Where calls and passes are counted."""

    def kubernetes_call(self, verb: str, resource: str, outcome: str, seconds: float) -> None:
        """One request to the API server."""
        ...

    def guard_call(self, command: str, outcome: str, seconds: float) -> None:
        """One request to a guard; long polls are not counted."""
        ...

    def reconcile(self, outcome: str, seconds: float) -> None:
        """One pass."""
        ...

    def update_phase(self, namespace: str, name: str, step: str, seconds: float) -> None:
        """A phase of an update that ended."""
        ...

    def update_finished(self, namespace: str, name: str, outcome: str) -> None:
        """An update that ended."""
        ...
