"""A simulated trainer: it holds the sender's Lease, offers a version, and pushes once the fleet is quiesced."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rollfleet_operator.api.weightversion import Phase, Source, SourceType
from rollfleet_operator.core.observed import SenderView
from rollfleet_protocol.state import DigestSource, WeightsState

if TYPE_CHECKING:
    from tests.support.simulated_world import World

ACCOUNT = "grpo"
PUSHED = Source(type=SourceType.TRAINER)
LEASE_S = 15.0
RENEWS_S = 5.0


def digest_sent(version: int) -> str:
    """Of the weights that honest trainers send as this version."""
    return f"sha256:pushed-{version}"


@dataclass
class Trainer:
    """One process. What it does wrong is switched on by tests."""

    holder: str = f"{ACCOUNT}/1"
    account_uid: str = "account-uid"
    offers: str = ""
    alive: bool = True
    stalls: bool = False  # never begins
    tells_digest: bool = True
    send_s: float = 1.0
    received: dict[int, str] = field(default_factory=dict)  # what an engine (by ordinal) got instead of what was sent
    message: str = ""
    touched: int = 0  # engines that it has begun with
    _renewed: float = -1e9

    def offer(self, world: "World", version: int, name: str = "qwen-policy") -> None:
        """Stand ready with this version."""
        self.offers = f"{world.weight_versions[name].metadata.uid}/{version}"

    def view(self, world: "World") -> SenderView:
        """Its Lease, as the operator sees it."""
        if self.alive and world.time - self._renewed >= RENEWS_S:
            self._renewed = world.time
        renewed = world.at(self._renewed)
        return SenderView(self.holder, LEASE_S, renewed, self.offers, self.message, self.account_uid)

    def act(self, world: "World") -> None:
        """Push to every target that waits for it."""
        if not self.alive or self.stalls:
            return
        for weight_version in world.weight_versions.values():
            status = weight_version.status
            if status.phase is Phase.TRANSFERRING and status.sender is not None and status.sender.holder == self.holder:
                self._push(world, status.version)

    def _push(self, world: "World", version: int) -> None:
        for pod in world.all_pods:
            process = pod.process
            push = None if process is None else process.state.push
            if process is None or push is None or push.holder != self.holder or not process.awaits_push:
                continue
            digest = self.received.get(pod.view.ordinal, digest_sent(version))
            source = DigestSource.TRAINER if self.tells_digest else DigestSource.ENGINES_ONLY
            process.push(world.time, digest, source, self.send_s)
            self.touched += 1


@dataclass
class Lease:
    """Whoever holds it; nobody at first."""

    trainer: Trainer | None = None

    def view(self, world: "World") -> SenderView:
        """As the operator sees it."""
        return SenderView() if self.trainer is None else self.trainer.view(world)

    def take(self, trainer: Trainer) -> Trainer:
        """This one holds it from now on."""
        self.trainer = trainer
        return trainer

    def release(self, message: str = "") -> None:
        """Nobody holds it."""
        if self.trainer is not None:
            self.trainer = replace(self.trainer, holder="", offers="", alive=False, message=message)


def still_old(world: "World") -> bool:
    """Whether no engine's weights were touched."""
    return all(
        pod.process is None or pod.process.state.weights.state is WeightsState.VERIFIED for pod in world.pods.values()
    )
