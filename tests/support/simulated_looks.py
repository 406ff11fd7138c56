"""What the simulated cluster says of itself: the promises that it checks after every change, and what tests ask."""

from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import Phase, StrategyType, WeightVersion, WeightVersionStatus
from rollfleet_protocol.commands import Command, Open, Transfer
from rollfleet_protocol.state import Gate, WeightsState
from tests.support.builders import digest_of
from tests.support.simulated_engine import MODEL_DIGEST, EngineProcess
from tests.support.simulated_pods import SimulatedPod

ENDED = (Phase.ACTIVE, Phase.FAILED)


class Looks:
    """Judged by what engines really hold, and by the objects as the API server has them."""

    fleet: RolloutEngine
    weight_versions: dict[str, WeightVersion]
    pods: dict[str, SimulatedPod]
    ghosts: dict[str, SimulatedPod]
    stored_nowhere: set[int]

    @property
    def all_pods(self) -> list[SimulatedPod]:
        """Those that the API server knows, and those that run without its knowledge."""
        return [*self.pods.values(), *self.ghosts.values()]

    def check(self) -> None:
        """Never stale, atomic: whoever is open is verified at the committed version, and really holds it."""
        committed = self.fleet.status.committed
        for pod in self.all_pods:
            process = pod.process
            if process is None or process.state.gate is Gate.CLOSED:
                continue
            weights = process.state.weights
            assert weights.state is WeightsState.VERIFIED, pod.view.name
            assert committed is not None, f"{pod.view.name} is open before anything was committed"
            if committed.previous is not None and weights.version == committed.previous.version:
                before = committed.previous  # the fleet rolls
                assert process.resident == (before.digest or MODEL_DIGEST), f"{pod.view.name} serves {process.resident}"
                continue
            assert weights.version == committed.version, (
                f"{pod.view.name} is open at {weights.version}, not {committed}"
            )
            path = committed.checkpoint or ""
            expected = MODEL_DIGEST if committed.version == 0 else self.store.digests.get(path, digest_of(path))
            if committed.version in self.stored_nowhere or str(committed.digest).startswith("sha256:pushed"):
                expected = str(committed.digest)
            assert process.resident == expected, f"{pod.view.name} serves {process.resident}"

    def _check_command(self, pod: SimulatedPod, command: Command) -> None:
        committed = self.fleet.status.committed
        held = None if committed is None else committed.version
        if isinstance(command, Transfer) and command.version != held and not self._rolls(command.version):
            loud = [
                other.view.name
                for other in self.all_pods
                if other.process is not None and (other.process.state.gate is Gate.OPEN or other.process.in_flight)
            ]
            assert not loud, f"transfer to {pod.view.name} while {loud} answer"
        if isinstance(command, Open):
            assert command.version == held, f"Open at {command.version}, committed is {held}"
        assert command.epoch <= self.fleet.status.epoch, "an epoch was used before it was recorded"

    def _rolls(self, version: int) -> bool:
        """Whether this version is asked for with strategy Rolling: others may answer meanwhile."""
        asked = [each.spec for each in self.weight_versions.values() if each.spec.version == version]
        return any(spec.strategy.type is StrategyType.ROLLING for spec in asked)

    def apply_weight_version(self, weight_version: WeightVersion) -> None:
        """kubectl apply."""
        known = self.weight_versions.get(weight_version.metadata.name)
        if known is not None:
            meta = known.metadata.model_copy(update={"generation": known.metadata.generation + 1})
            weight_version = weight_version.model_copy(update={"status": known.status, "metadata": meta})
        self.weight_versions[weight_version.metadata.name] = weight_version

    def status(self, name: str = "qwen-policy") -> WeightVersionStatus:
        """Of a WeightVersion."""
        return self.weight_versions[name].status

    def ended(self, version: int, name: str = "qwen-policy") -> bool:
        """Whether this version's update has ended."""
        status = self.status(name)
        return status.version == version and status.phase in ENDED

    def open_versions(self) -> list[int]:
        """Versions that answer now, one for each open engine."""
        return [
            pod.process.state.weights.version or 0
            for pod in self.pods.values()
            if pod.process is not None and pod.process.state.gate is Gate.OPEN
        ]

    def all_serve(self, version: int) -> bool:
        """Whether every engine that is asked for answers from this version."""
        return (
            self.open_versions() == [version] * self.fleet.spec.replicas and len(self.pods) == self.fleet.spec.replicas
        )

    def in_phase(self, phase: Phase) -> bool:
        """Whether the update is recorded in this phase."""
        return self.status().phase is phase

    def process_of(self, ordinal: int) -> EngineProcess:
        """The engine of an ordinal."""
        process = next(pod.process for pod in self.pods.values() if pod.view.ordinal == ordinal)
        assert process is not None
        return process

    def uid_of(self, ordinal: int) -> str:
        """Its pod."""
        return next(pod.view.uid for pod in self.pods.values() if pod.view.ordinal == ordinal)
