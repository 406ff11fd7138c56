"""What one pass looks at: a snapshot of the objects and of what the guards said last."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_protocol.state import EngineState

ENDED_PHASES = ("Succeeded", "Failed")


class ContainerState(StrEnum):
    """The engine container as the kubelet tells it."""

    WAITING = "Waiting"
    RUNNING = "Running"
    TERMINATED = "Terminated"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class PodView:
    """An engine's pod, reduced to what decisions need."""

    name: str
    uid: str
    ordinal: int
    created: datetime
    template_hash: str
    serving_label: bool
    phase: str  # Pending | Running | Succeeded | Failed | Unknown
    ip: str = ""
    node: str = ""
    deleting: bool = False
    deleted_by: datetime | None = None  # of a pod that is being deleted: when its grace period is over
    ready: bool = False
    container: ContainerState = ContainerState.UNKNOWN
    container_id: str = ""
    restarts: int = 0
    exit_code: int | None = None  # of the last termination
    message: str = ""  # waiting reason, termination message or the scheduler's words
    unschedulable: bool = False
    started: bool = (
        True  # False: the kubelet says that this container never passed its startup probe, so no guard opened
    )
    running_since: datetime | None = None  # since when its container runs; None where it does not
    ready_since: datetime | None = None  # since when it has been Ready; None where it is not
    failed_from: datetime | None = None  # when the run began that ended last
    stopped: str = ""  # why the operator has stopped it, for good
    grace_s: int = 30  # terminationGracePeriodSeconds
    node_index: int = 0  # which pod of its engine; all but 0 have no guard
    leader: str = ""  # name of the pod that leads it, where it does not lead
    vanished_since: datetime | None = None  # the API server has no such pod any more; see core.vanished
    vanished_epoch: int = 0

    @property
    def leads(self) -> bool:
        """Whether it has its engine's guard. The only pod of an engine does."""
        return self.node_index == 0

    @property
    def halted(self) -> bool:
        """By the kubelet's word, no process runs in which a guard could ever have been opened."""
        waiting = self.container in (ContainerState.WAITING, ContainerState.TERMINATED)
        return self.ended or waiting or self.phase == "Pending" or not self.started

    @property
    def over(self) -> bool:
        """By the kubelet's word, containers that ran in it have ended.

        That one had not started yet says nothing of a pod that is gone: what was heard of it last may be old.
        """
        return self.halted and (self.ended or self.container is ContainerState.TERMINATED or self.exit_code is not None)

    @property
    def ended(self) -> bool:
        """The pod is over by the kubelet's word: evicted, or its node was shut down.

        The control plane writes Failed into pods whose Node object is gone; their containers may still run, and a
        kubelet would have told that they ended (it writes Failed no sooner).
        """
        return self.phase in ENDED_PHASES and self.container is not ContainerState.RUNNING

    @property
    def vanished(self) -> bool:
        """Whether this is only what the fleet's status remembers of a pod."""
        return self.vanished_since is not None


@dataclass(frozen=True)
class NodeView:
    """A node, as far as it says whether containers run there."""

    name: str
    exists: bool = True
    ready_since: datetime | None = None  # None where the node is not Ready
    heard: datetime | None = None  # when its kubelet reported last; it does every 5 minutes, Kubernetes 1.36
    out_of_service: bool = False  # carries the taint by which a person says that the node is switched off


@dataclass(frozen=True)
class GuardView:
    """What is known of one pod's guard. Kept by the follower of that pod."""

    state: EngineState | None  # newest that it told; None before the first answer
    reachable: bool  # whether the newest contact succeeded
    last_contact: datetime | None
    error: str = ""  # text of the newest failure
    refusals: tuple[
        tuple[str, str], ...
    ] = ()  # (command name, text) refused or failed at this incarnation and epoch, newest last
    setbacks: int = 0  # commands refused and operations seen to fail at this incarnation and epoch, repeats counted
    last_setback: datetime | None = None  # when the newest of them was seen; what retries are counted from
    setback_epoch: int | None = None  # that it was about: a command of a newer one has not been tried yet
    disowned: bool = False  # the newest answer: it knows who we are, and obeys another operator
    unguarded: bool = False  # the newest answer: it does not refuse a command without identity; see `error`
    # The highest epoch that it can have come to honestly: what it named when it was met, or what was recorded since.
    # None: nobody has followed it for long enough to tell.
    vouched: int | None = None


@dataclass(frozen=True)
class SenderView:
    """What the sender's Lease says, and since when it has said it."""

    holder: str = ""  # holderIdentity: <ServiceAccount>/<instance>; empty: nobody holds it
    duration_s: float = 0.0  # for which it may believe that it holds the Lease, from its last renewal
    renewed: datetime | None = None  # when the newest renewal was seen, by this operator's clock
    offers: str = ""  # <uid of a WeightVersion>/<version>: what the holder stands ready to send
    message: str = ""  # why the holder gave up, in its own words
    uid: str = ""  # of its ServiceAccount; empty: there is none of that name

    @property
    def account(self) -> str:
        """Name of its ServiceAccount."""
        return self.holder.partition("/")[0]


@dataclass(frozen=True)
class Settings:
    """What the operator was started with and decisions need."""

    operator_subject: str
    operator_uid: str
    router_image: str
    host_path_allowed: bool
    operator_namespace: str = ""
    operator_pods: tuple[tuple[str, str], ...] = ()  # labels; none: engines get no NetworkPolicy
    probe_tokens: tuple[int, ...] = (1, 2, 3, 5, 7, 11)
    probe_tolerance: float = 1e-3
    operator_silence_s: float = 30.0
    up_since: datetime | None = None  # since when this operator acts; deadlines count from here at least
    away: tuple[tuple[datetime, datetime], ...] = ()  # when the API server was out of its reach since, oldest first


@dataclass(frozen=True)
class Observed:
    """Everything that one pass of `plan` may know of the world, besides the clock."""

    fleet: RolloutEngine
    weight_versions: tuple[WeightVersion, ...]  # all that name this fleet, whatever their state
    pods: tuple[PodView, ...]
    guards: dict[str, GuardView]  # by pod uid
    ca_bundle: str  # base64 PEM of the CA that signs this fleet's certificate
    settings: Settings
    children: dict[str, Any] = field(
        default_factory=dict
    )  # "Kind/name" -> content hash last applied, for children other than pods
    sender: SenderView = field(default_factory=SenderView)
    nodes: dict[str, NodeView] = field(default_factory=dict)  # those of engines that do not answer, as far as known
    terminated: frozenset[str] = frozenset()  # uids of pods that are gone, their containers ended by the kubelet's word
    rejected: str = ""  # what the API server refused in the newest pass that asked for anything, in its own words
