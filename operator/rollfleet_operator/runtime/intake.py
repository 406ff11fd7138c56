"""What kopf's watches tell: into the store and the queue, and nothing else. kopf writes nothing to any object."""

from typing import Any

import kopf
from kubernetes.aio.client.configuration import Configuration

from rollfleet_operator.api.meta import GROUP, LABEL_FLEET, VERSION
from rollfleet_operator.ports import CHILDREN, LEASES, PODS, ROLLOUT_ENGINES, WEIGHT_VERSIONS, Manifest, Resource
from rollfleet_operator.runtime.records import Records
from rollfleet_operator.runtime.store import key_of

SCHEME_AND_TOKEN = 2


class Intake:
    """Takes events."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def fleet(self, kind: str | None, body: Manifest) -> None:
        """A RolloutEngine changed."""
        metadata = body["metadata"]
        self._records.ledger.told(ROLLOUT_ENGINES, body, deleted=kind == "DELETED")
        self._records.queue.put(key_of(metadata["namespace"], metadata["name"]))

    def weight_version(self, kind: str | None, body: Manifest) -> None:
        """A WeightVersion changed: its fleet's matter."""
        self._records.ledger.told(WEIGHT_VERSIONS, body, deleted=kind == "DELETED")
        name = ((body.get("spec") or {}).get("engineRef") or {}).get("name")
        if name:
            self._records.queue.put(key_of(body["metadata"]["namespace"], name))

    def pod(self, kind: str | None, body: Manifest) -> None:
        """An engine's pod changed. Only what decisions see of it is news.

        To a watch by label, a pod that lost the label is deleted. It may serve all the same.
        """
        self._records.ledger.told(PODS, body, deleted=kind == "DELETED")
        uid, pods = body["metadata"]["uid"], self._records.pods
        key = pods.upsert(body)  # the last state of a pod that is gone, too: it tells whether its containers ended
        if kind == "DELETED":
            key = pods.doubt(uid)
        if key is not None:
            self._records.followers.hurry(key, uid)
            self._records.queue.put(key)

    def child(self, resource: Resource, kind: str | None, body: Manifest) -> None:
        """A child other than a pod changed; news is that it no longer says what was applied, or what a trainer says."""
        self._records.ledger.told(resource, body, deleted=kind == "DELETED")
        key = self._records.children.told(resource.kind, body, deleted=kind == "DELETED")
        if key is not None:
            self._records.queue.put(key)
        sender = self._records.senders.told(body, deleted=kind == "DELETED") if resource is LEASES else None
        if sender is not None:
            self._records.queue.put(sender)


class NoMemory(kopf.DiffBaseStorage):
    """kopf compares nothing for us: no copy of each object at each event (4 ms, measured), nothing to write back."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Nothing of an object is remembered."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Nothing was remembered."""
        return None

    def store(self, **_: Any) -> None:
        """Never called without handlers of changes."""


def build_registry(intake: Intake, configuration: Configuration) -> kopf.OperatorRegistry:
    """kopf's handlers: watches of our kinds, pods and other children, and a log-in."""
    registry = kopf.OperatorRegistry()

    @kopf.on.event(GROUP, VERSION, ROLLOUT_ENGINES.plural, registry=registry)
    async def on_fleet(event: Any, **_: Any) -> None:
        intake.fleet(event["type"], event["object"])

    @kopf.on.event(GROUP, VERSION, WEIGHT_VERSIONS.plural, registry=registry)
    async def on_weight_version(event: Any, **_: Any) -> None:
        intake.weight_version(event["type"], event["object"])

    @kopf.on.event("v1", PODS.plural, registry=registry)
    async def on_pod(event: Any, **_: Any) -> None:
        intake.pod(event["type"], event["object"])

    for resource in CHILDREN:
        _watch_child(registry, intake, resource)

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        return await connection_info(configuration)

    return registry


def _watch_child(registry: kopf.OperatorRegistry, intake: Intake, resource: Resource) -> None:
    @kopf.on.event(*_address(resource), registry=registry, id=f"on_{resource.plural}")
    async def on_child(event: Any, **_: Any) -> None:
        intake.child(resource, event["type"], event["object"])


def _address(resource: Resource) -> tuple[str, str, str]:
    """As kopf names a kind."""
    return resource.group, resource.api_version.rpartition("/")[2], resource.plural


def kopf_settings() -> kopf.OperatorSettings:
    """kopf as an informer: no posting, no scanning for kinds and namespaces that come and go, short waits."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoMemory()
    settings.scanning.disabled = True
    settings.networking.error_backoffs = [0.5, 1, 2, 4, 8]
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 60
    for resource in (PODS, *CHILDREN):
        settings.watching.label_selectors[_address(resource)] = LABEL_FLEET
    settings.watching.chunk_size = 500
    settings.queueing.exit_timeout = 1
    settings.queueing.idle_timeout = 1
    settings.process.ultimate_exiting_timeout = None  # it would kill the process some time after a mere new start
    return settings


async def connection_info(configuration: Configuration) -> kopf.ConnectionInfo:
    """Our own credentials in kopf's form, read again whenever kopf found the last ones refused."""
    header = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    parts = header.split(" ", 1) if header else []
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=parts[0].capitalize() if len(parts) == SCHEME_AND_TOKEN else None,
        token=parts[-1] if parts else None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
