"""The pods of the simulated cluster, and the kubelet that starts, restarts and ends them."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from rollfleet_operator.core.observed import ContainerState, PodView
from rollfleet_protocol.engine_config import ENGINE_CONFIG_ENV, EngineConfig
from tests.support.simulated_engine import EngineProcess, Store, Temper

NODE = "node-1"
DOWN: dict[str, Any] = {"started": False, "ready": False, "ready_since": None}


@dataclass
class SimulatedPod:
    """A pod and, while its container runs, the engine in it."""

    view: PodView
    process: EngineProcess | None = None
    temper: Temper = field(default_factory=Temper)
    obeys: str = ""  # uid of the operator's ServiceAccount when the pod was made
    cut_off_until: float = -1.0  # the operator can't reach it
    incarnations: int = 0


class Kubelet(ABC):
    """The part of the world that is about pods. Times are seconds of the simulated clock."""

    rng: random.Random
    time: float
    store: Store
    load_s: float
    temper: Callable[[], Temper]
    doom: Callable[[PodView], int | None]  # exit code of an engine that can't start now
    pods: dict[str, SimulatedPod]
    ghosts: dict[str, SimulatedPod]  # run on, and the API server does not know them any more
    terminated: set[str]  # uids of pods that went when the kubelet had said that their containers ended
    _serial: int

    @property
    @abstractmethod
    def now(self) -> datetime:
        """The simulated time."""

    @abstractmethod
    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something then."""

    def create_pod(self, manifest: dict[str, Any]) -> None:
        """As the API server and the scheduler do it; a name that is taken is none of their business twice."""
        meta = manifest["metadata"]
        if any(pod.view.name == meta["name"] for pod in self.pods.values()):
            return
        self._serial += 1
        uid = f"uid-{self._serial}"
        view = PodView(
            name=meta["name"],
            uid=uid,
            ordinal=int(meta["labels"]["rollfleet.io/engine"]),
            created=self.now,
            template_hash=meta["annotations"]["rollfleet.io/template-hash"],
            serving_label=False,
            phase="Pending",
            started=False,
            node=NODE,
        )
        self.pods[uid] = SimulatedPod(view, temper=self.temper(), obeys=_operator_of(manifest))
        self.later(0.1, lambda: self._start_container(uid))

    def change(self, uid: str, **changes: Any) -> None:
        """Change what the API server says of a pod."""
        if uid in self.pods:
            self.pods[uid].view = replace(self.pods[uid].view, **changes)

    def _start_container(self, uid: str) -> None:
        if uid not in self.pods or self.pods[uid].view.deleting:
            return
        self.change(
            uid, phase="Running", container=ContainerState.RUNNING, ip=f"198.51.100.{self._serial % 250}", started=False
        )
        self.later(self.load_s, lambda: self._come_up(uid))

    def _come_up(self, uid: str) -> None:
        pod = self.pods.get(uid)
        if pod is None or pod.view.deleting or pod.view.stopped or pod.process is not None:
            return
        code = self.doom(pod.view)
        if code is not None:
            self._fail(uid, code)
            return
        pod.incarnations += 1
        pod.process = EngineProcess(f"{uid}/{pod.incarnations}", self.store, pod.temper, self.rng)
        incarnation = pod.incarnations
        self.later(self.rng.uniform(0.0, 2.0), lambda: self._confirm(uid, incarnation))

    def _confirm(self, uid: str, incarnation: int) -> None:
        pod = self.pods.get(uid)
        if pod is not None and pod.process is not None and pod.incarnations == incarnation:
            self.change(uid, started=True, ready=True, ready_since=self.now)

    def _fail(self, uid: str, code: int) -> None:
        """It ended before it was up; the kubelet backs off: 10, 20, 40 ... 300 s."""
        container, restarts = ContainerState.WAITING, self.pods[uid].view.restarts
        words = f"CrashLoopBackOff; Error: why it ended with {code}"
        began = self.now - timedelta(seconds=self.load_s)
        self.change(uid, container=container, exit_code=code, message=words, failed_from=began, **DOWN)
        self.later(min(10.0 * 2.0 ** min(restarts, 10), 300.0), lambda: self._try_again(uid))

    def _try_again(self, uid: str) -> None:
        if uid in self.pods and not self.pods[uid].view.stopped:
            restarts = self.pods[uid].view.restarts + 1
            self.change(uid, container=ContainerState.RUNNING, restarts=restarts)
            self.later(self.load_s, lambda: self._come_up(uid))

    def crash(self, uid: str) -> None:
        """The engine's process dies; the kubelet starts the container again."""
        pod = self.pods[uid]
        if pod.process is None:
            return
        pod.process = None
        self.later(0.05, lambda: self._restart_container(uid))

    def _restart_container(self, uid: str) -> None:
        if uid in self.pods and self.pods[uid].process is None:
            restarts = self.pods[uid].view.restarts + 1
            self.change(uid, restarts=restarts, exit_code=1, **DOWN)
            self.later(self.load_s, lambda: self._come_up(uid))

    def stop_pod(self, uid: str, why: str) -> None:
        """Its deadline is over: the kubelet ends it, and the object stays."""
        if uid in self.pods:
            self.pods[uid].process = None
            self.change(uid, stopped=why, phase="Failed", container=ContainerState.TERMINATED, **DOWN)

    def delete_pod(self, uid: str, hook_after_s: float = 0.0) -> None:
        """It drains and goes, as soon as the kubelet comes to its hook."""
        pod = self.pods.get(uid)
        if pod is None or pod.view.deleting:
            return
        self.change(uid, deleting=True)
        if hook_after_s:
            self.later(hook_after_s, lambda: self._drain(uid))
        else:
            self._drain(uid)

    def _drain(self, uid: str) -> None:
        pod = self.pods[uid]
        if pod.process is not None:
            pod.process.drain(self.time)
        self.later(1.0, lambda: self._remove(uid))

    def _remove(self, uid: str) -> None:
        if self.pods.pop(uid, None) is not None:
            self.terminated.add(uid)

    def vanish(self, uid: str) -> SimulatedPod:
        """The object goes (a forced deletion, a garbage collection); the container does not notice."""
        ghost = self.ghosts[uid] = self.pods.pop(uid)
        return ghost

    def come_back(self, uid: str) -> None:
        """A watch was wrong."""
        self.pods[uid] = self.ghosts.pop(uid)

    def kill_ghost(self, uid: str) -> None:
        """Its process ends, and nobody is told."""
        self.ghosts[uid].process = None

    def cut_off(self, uid: str, seconds: float) -> None:
        """The operator can't reach the engine for a while."""
        (self.pods | self.ghosts)[uid].cut_off_until = self.time + seconds


def _operator_of(manifest: dict[str, Any]) -> str:
    """As the guard in this pod will read it."""
    env = manifest["spec"]["containers"][0]["env"]
    config = next(variable["value"] for variable in env if variable["name"] == ENGINE_CONFIG_ENV)
    return EngineConfig.model_validate_json(config).operator.uid
