"""What each engine is doing, in one word and in its own text."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from rollfleet_operator.api.rolloutengine import Committed, EngineDetail, EnginesSummary
from rollfleet_operator.core.catch_up import Joiner, Obstacle
from rollfleet_operator.core.conditions import clip
from rollfleet_operator.core.groups import placed, waits_for_a_place
from rollfleet_operator.core.observed import ContainerState, PodView
from rollfleet_operator.core.steps import source_of
from rollfleet_operator.core.vanished import is_unfenced, unfenced_text
from rollfleet_operator.core.work import Work, own_words
from rollfleet_operator.core.world import Engine, World, holds
from rollfleet_protocol.refusals import ClosedReason
from rollfleet_protocol.state import EngineState, Gate, WeightsState
from rollfleet_protocol.termination import EXIT_TEMPORARY

MAX_DETAILS = 10
MAX_TEXT = 512
WAITING_IS_BROKEN = (  # the kubelet's waiting reasons that do not pass by themselves
    "CrashLoopBackOff",
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
)


SPARED = "; it is not stopped, since no engine of this template is up: a cause that all share may pass by itself"


class Doing(StrEnum):
    """An engine's state as the fleet's status counts it."""

    UNSCHEDULABLE = "Unschedulable"
    STARTING = "Starting"
    WAITING_FOR_WEIGHTS = "WaitingForWeights"
    CATCHING_UP = "CatchingUp"
    UPDATING = "Updating"
    SERVING = "Serving"
    UNREACHABLE = "Unreachable"
    UNFENCED = "Unfenced"
    UNCERTAIN = "Uncertain"
    BROKEN = "Broken"
    TERMINATING = "Terminating"


DOING_OF = {
    Obstacle.NO_SOURCE: Doing.WAITING_FOR_WEIGHTS,
    Obstacle.CHANGED: Doing.BROKEN,
    Obstacle.DISAGREES: Doing.BROKEN,
    Obstacle.HELD: Doing.UNCERTAIN,
}
JOINING = (Doing.CATCHING_UP, Doing.WAITING_FOR_WEIGHTS)
PATIENCE = 3  # failures of one engine under one epoch, about 7 s: after them what keeps it from joining is a fault
UNWELL = (Doing.UNSCHEDULABLE, Doing.UNREACHABLE, Doing.UNFENCED, Doing.UNCERTAIN, Doing.BROKEN)


@dataclass(frozen=True)
class EngineNote:
    """What is said of one engine."""

    engine: Engine
    doing: Doing
    text: str = ""

    @property
    def unwell(self) -> bool:
        """Something is wrong with it: not merely on its way."""
        failing = self.engine.guard is not None and self.engine.guard.setbacks >= PATIENCE
        return self.doing in UNWELL or (self.doing in JOINING and failing)


@dataclass(frozen=True)
class Scene:
    """What judging an engine takes besides itself."""

    world: World
    committed: Committed | None
    stuck: dict[str, Joiner]
    under_way: bool  # an update runs, from Preparing to the commit
    targets: frozenset[str]  # pods of that update
    spared: frozenset[str] = frozenset()  # pods that would be stopped if an engine of their template were up


def describe(scene: Scene, work: Work) -> tuple[EngineNote, ...]:
    """All engines, in the order of their ordinals."""
    notes = [_describe(scene, engine, work) for engine in scene.world.engines]
    return tuple(replace(note, text=note.text + SPARED) if note.engine.name in scene.spared else note for note in notes)


def _describe(scene: Scene, engine: Engine, work: Work) -> EngineNote:  # noqa: PLR0911 - one answer per case
    pod, state = engine.pod, engine.answering
    if pod.vanished or (pod.deleting and state is None and is_unfenced(engine, work.now)):
        return EngineNote(engine, Doing.UNFENCED, unfenced_text(engine, scene.world.fleet))
    if pod.deleting:
        return EngineNote(engine, Doing.TERMINATING)
    if pod.stopped or engine.ended:
        return EngineNote(engine, Doing.BROKEN, pod.stopped or f"the pod is {pod.phase}: {pod.message}".rstrip(": "))
    if waits_for_a_place(engine):
        return EngineNote(engine, Doing.UNSCHEDULABLE, _unplaced(scene, engine))
    if engine.quarantined and engine.state is not None:
        text = f"quarantined: it names epoch {engine.state.epoch}, which nobody gave it; delete the pod"
        return EngineNote(engine, Doing.BROKEN, text)
    if state is None or (engine.stopped and state.gate is Gate.CLOSED and not pod.ip):
        return _absent(scene, engine, work)
    if not state.alive:
        return EngineNote(engine, Doing.BROKEN, own_words(engine)[1] or "the engine core is dead")
    if engine.serves(scene.committed):
        return EngineNote(engine, Doing.SERVING)
    return _closed(scene, engine, state)


def _absent(scene: Scene, engine: Engine, work: Work) -> EngineNote:
    """Its guard does not answer."""
    pod = engine.pod
    if engine.unguarded and engine.guard is not None:
        return EngineNote(engine, Doing.BROKEN, engine.guard.error)
    if engine.disowned and engine.guard is not None:
        return EngineNote(engine, Doing.UNREACHABLE, engine.guard.error + _kept(scene.committed))
    if broken := _broken_words(engine):
        return EngineNote(engine, Doing.BROKEN, broken)
    seconds = scene.world.fleet.spec.startup.timeout_seconds
    if engine.stopped or engine.state is None:
        due = pod.created + timedelta(seconds=seconds)
        if work.now >= due:
            text = f"is not up {seconds} s after its pod was made (spec.startup.timeoutSeconds): {_restarted(pod)}"
            return EngineNote(engine, Doing.BROKEN, text.rstrip(": "))
        work.wake(due)
        words = _restarted(pod) if pod.restarts else pod.message
        of_peers = (f"pod {peer.name}: {peer.message}" for peer in engine.peers if peer.message)
        return EngineNote(engine, Doing.STARTING, words or next(of_peers, ""))
    return EngineNote(engine, Doing.UNREACHABLE, engine.guard.error if engine.guard else "")


def _kept(committed: Committed | None) -> str:
    """Why a pod whose guard obeys another operator is not replaced, and who can do something about it."""
    if committed is None or source_of(committed) is not None:
        return ""
    return (
        f"; version {committed.version} is stored nowhere, so this pod is not replaced: name a copy in "
        "spec.recovery.checkpoint of the WeightVersion that asks for it, or delete such pods and let a trainer send "
        "the next version"
    )


def _broken_words(engine: Engine) -> str:
    """Of a container that has ended or cannot be started; empty where there is none.

    Of an engine of several pods the leading one only waits for the others, or ended with them: their own word is first.
    """
    broken = next((peer for peer in engine.peers if _is_broken(peer) and peer.exit_code != EXIT_TEMPORARY), None)
    if broken is not None:
        return f"pod {broken.name}: {_restarted(broken)}"
    return (_restarted(engine.pod) or "its container ended") if _is_broken(engine.pod) else ""


def _is_broken(pod: PodView) -> bool:
    """Its container has ended, or cannot be started, and that does not pass by itself."""
    waits = pod.container is ContainerState.WAITING and pod.message.startswith(WAITING_IS_BROKEN)
    return not pod.deleting and (waits or pod.container is ContainerState.TERMINATED)


def _unplaced(scene: Scene, engine: Engine) -> str:
    """The scheduler's words; of an engine of several pods also what it holds, which others may be waiting for."""
    pods = (engine.pod, *engine.peers)
    if len(pods) == 1:
        return engine.pod.message
    waiting = next(pod for pod in pods if pod.unschedulable and not pod.deleting)
    held = sorted(pod.node for pod in placed(engine))
    text = f"pod {waiting.name}: {waiting.message}"
    if held:
        nodes = scene.world.fleet.spec.parallelism.nodes
        text = f"{text}; the engine holds {len(held)} of its {nodes} places ({', '.join(held)}) meanwhile"
    return text


def _restarted(pod: PodView) -> str:
    times = f"restarted {pod.restarts} times" if pod.restarts else ""
    code = "" if pod.exit_code is None else f"exit code {pod.exit_code}"
    return ": ".join(text for text in (", ".join(text for text in (times, code) if text), pod.message) if text)


def _closed(scene: Scene, engine: Engine, state: EngineState) -> EngineNote:  # noqa: PLR0911 - one answer per case
    """Its guard answers, and it does not serve the committed version."""
    joiner = scene.stuck.get(engine.name)
    if joiner is not None:
        return EngineNote(engine, DOING_OF[joiner.obstacle], joiner.text)
    failure = _failure(engine)
    if scene.under_way:
        takes_part = engine.name in scene.targets or (
            not scene.targets and state.closed_reason == ClosedReason.UPDATING.value
        )
        if takes_part:
            return EngineNote(engine, Doing.UPDATING, failure)
        return EngineNote(engine, Doing.WAITING_FOR_WEIGHTS, failure or "joins after the update")
    if scene.committed is None:
        if state.weights.state is WeightsState.UNCERTAIN:
            return EngineNote(engine, Doing.UNCERTAIN, failure)
        return EngineNote(engine, Doing.WAITING_FOR_WEIGHTS, failure)
    if holds(state, scene.committed) and engine.name in scene.targets:
        return EngineNote(engine, Doing.UPDATING, failure)
    return EngineNote(engine, Doing.CATCHING_UP, failure)


def _failure(engine: Engine) -> str:
    reason, text = own_words(engine)
    return f"{reason}: {text}" if reason and text else text


def summarise(notes: tuple[EngineNote, ...], old: EnginesSummary, now: datetime) -> EnginesSummary:
    """Counts, and the details of those that are not well. `since` stays while the state does."""
    counts: dict[str, int] = {}
    for note in notes:
        counts[note.doing.value] = counts.get(note.doing.value, 0) + 1
    known = {(detail.name, detail.state): detail.since for detail in old.details}
    told = [
        note for note in notes if note.doing is not Doing.SERVING and (note.doing is not Doing.UPDATING or note.text)
    ]
    told.sort(key=lambda note: (not note.unwell, note.engine.ordinal, note.engine.name))
    details = tuple(
        EngineDetail(
            name=note.engine.name,
            ordinal=note.engine.ordinal,
            state=note.doing.value,
            since=known.get((note.engine.name, note.doing.value), now.replace(microsecond=0)),
            message=clip(note.text, MAX_TEXT),
        )
        for note in told[:MAX_DETAILS]
    )
    return EnginesSummary(counts=dict(sorted(counts.items())), details=details, time=old.time)
