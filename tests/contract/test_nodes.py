"""An engine of two pods: two launchers that meet, serve as one, and end as one."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from rollfleet_protocol.engine_config import PLACE_ENV
from rollfleet_protocol.state import Gate, WeightsState
from tests.contract.client import LONG_ANSWER, Answer, Client, Operator, held, wait_in_flight
from tests.contract.conftest import VLLM
from tests.contract.models import Models
from tests.contract.process import EngineProcess, Kind, Site, until
from tests.contract.trainer import Trainer
from tests.support.ports import free_ports

NODES = 2
LEADER = "qwen-0-0-abcdef"
END_S = 60.0


@dataclass
class Pair:
    """Leader and follower."""

    leader: EngineProcess
    follower: EngineProcess

    def ended(self) -> tuple[int, int]:
        """Exit codes of both launchers."""
        return self.leader.wait(END_S), self.follower.wait(END_S)


def place(node: int, leader: str = LEADER) -> dict[str, str]:
    return {PLACE_ENV: json.dumps({"node": node, "leader": leader, "leaderHost": "localhost"})}


@contextmanager
def pair(kind: Kind, site: Site, models: Models, name: str, **changes: object) -> Iterator[Pair]:
    """Both pods of one engine, on one machine."""
    meeting, master = free_ports(2)
    nodes = {"count": NODES, "meetingPort": meeting, "masterPort": master, "waitSeconds": 120}
    fields = {"nodes": nodes, "tensorParallelSize": NODES} | changes

    def pod(node: int) -> EngineProcess:
        of_node = Kind(kind.name, kind.environ | place(node))
        return EngineProcess(of_node, site, f"{kind.name}-{name}-{node}", models.folder(0), models.root, **fields)

    leader, follower = pod(0), pod(1)
    try:
        leader.wait_live()
        yield Pair(leader, follower)
    finally:
        for each in (leader, follower):
            each.stop()


@pytest.fixture(scope="module")
def shared(kind: Kind, site: Site, models: Models) -> Iterator[Pair]:
    transfer = {"weightTransfer": {"backend": "gloo"}} if kind.name == VLLM else {}
    with pair(kind, site, models, "pair", **transfer) as one:
        yield one


@pytest.fixture(scope="module")
def operator(shared: Pair, site: Site) -> Iterator[Operator]:
    one = Operator(shared.leader, site)
    yield one
    one.close_client()


@pytest.fixture(scope="module")
def client(shared: Pair) -> Iterator[Client]:
    one = Client(shared.leader)
    yield one
    one.close_client()


@pytest.fixture(scope="module")
def trainer(shared: Pair, site: Site, models: Models) -> Iterator[Trainer]:
    one = Trainer(shared.leader, site, models)
    yield one
    one.close()


def serves(client: Client, models: Models, version: int) -> None:
    answer = client.complete(models.short_prompt, models.longest_answer)
    assert (answer.status, answer.version, answer.text) == (200, version, models.answer(version, models.short_prompt))


@contextmanager
def speaking(engine: EngineProcess, site: Site) -> Iterator[tuple[Operator, Client]]:
    operator, client = Operator(engine, site), Client(engine)
    try:
        yield operator, client
    finally:
        operator.close_client()
        client.close_client()


def message(engine: EngineProcess) -> str:
    return str(json.loads(engine.termination_log.read_text())["error"])


def test_a_checkpoint_reaches_the_workers_of_every_node(
    shared: Pair, operator: Operator, client: Client, models: Models
):
    facts = operator.state().facts
    assert (facts.world_size, facts.data_parallel_size) == (NODES, 1)
    for version in (1, 2):
        state = operator.update(version, f"step-{version}")
        assert (state.gate, held(state)) == (Gate.OPEN, (WeightsState.VERIFIED, version, models.digest(version)))
        serves(client, models, version)
    state = operator.update(0, ".", root="Model")
    assert held(state)[0] is WeightsState.VERIFIED
    serves(client, models, 0)
    assert '"middleware"' not in shared.follower.log()
    assert not shared.follower.guard_log(), "only the leader has a guard"


def test_c17_a_push_reaches_the_workers_of_every_node(kind: Kind, trainer: Trainer, client: Client, models: Models):
    if kind.name != VLLM:
        pytest.skip("a simulated engine has no workers on another node")
    epoch, digest = trainer.operator.next_epoch(), models.digest(3)
    trainer.arm(epoch, 3)
    trainer.order(epoch, 3, "gloo", workers=NODES, worldSize=1 + NODES)
    assert trainer.send("gloo", 3, workers=NODES) == {"digest": digest}
    assert held(trainer.ended()) == (WeightsState.LOADED, 3, digest)
    trainer.operator.verify(epoch, 3, digest)
    trainer.operator.do("open", epoch, version=3, digest=digest)
    serves(client, models, 3)


def test_a_stranger_at_the_meeting_is_told_nothing_and_changes_nothing(shared: Pair, client: Client, models: Models):
    """The port is closed once all have met."""
    nodes = shared.leader.config.nodes
    assert nodes is not None
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", nodes.meeting_port), 5):
        pass
    assert client.complete(models.short_prompt, 1).status == 200


def test_when_a_node_dies_the_engine_ends_as_one_and_starts_again_as_one(
    kind: Kind, shared: Pair, operator: Operator, models: Models, site: Site
):
    before = operator.state().incarnation
    (engine, *_) = shared.follower.children()
    os.kill(engine, signal.SIGKILL)
    assert shared.ended() == (1, 137)
    assert message(shared.leader).startswith("an engine of several nodes ends as one: node 1 ended: ")
    assert "SIGKILL" in message(shared.follower)
    with pair(kind, site, models, "again") as fresh, speaking(fresh.leader, site) as (again, reader):
        assert again.state().incarnation != before
        assert again.state().gate is Gate.CLOSED
        again.update(2, "step-2")
        serves(reader, models, 2)
        (engine, *_) = fresh.leader.children()
        os.kill(engine, signal.SIGKILL)
        assert fresh.ended() == (137, 75)
        assert "node 0 ended: " in message(fresh.follower)


def test_a_node_that_is_told_to_stop_lets_the_leader_drain_first(kind: Kind, site: Site, models: Models):
    with pair(kind, site, models, "leaving") as leaving, speaking(leaving.leader, site) as (operator, client):
        operator.update(1, "step-1")
        answers: list[Answer] = []

        def ask() -> None:
            answers.append(client.complete(models.short_prompt, LONG_ANSWER))

        running = threading.Thread(target=ask, daemon=True)
        running.start()
        wait_in_flight(operator, 1)
        leaving.follower.signal(signal.SIGTERM)
        codes = leaving.ended()
        running.join(END_S)
        (answer,) = answers
        assert (answer.status, answer.finish_reason in ("length", "abort")) == (200, True)
        assert codes[0] == 1
        assert message(leaving.leader) == "an engine of several nodes ends as one: node 1 was told to stop"
        assert not leaving.follower.termination_log.exists(), "it was asked to"


def test_who_waits_in_vain_says_for_whom(kind: Kind, site: Site, models: Models):
    if kind.name == VLLM:
        pytest.skip("launchers meet before any engine is started")
    meeting, master = free_ports(2)

    def pod(node: int, name: str, wait_s: int, leader: str = LEADER) -> EngineProcess:
        of_node = Kind(kind.name, kind.environ | place(node, leader))
        nodes = {"count": 3, "meetingPort": meeting, "masterPort": master, "waitSeconds": wait_s}
        nodes["ledWaitSeconds"] = wait_s
        name, base = f"{kind.name}-vain-{name}", models.folder(0)
        return EngineProcess(of_node, site, name, base, models.root, nodes=nodes, tensorParallelSize=3)

    pods = [pod(0, "0", 6), pod(1, "1", 9), pod(2, "other", 3, "qwen-0-0-zyxwvu")]
    codes = [each.wait(END_S) for each in pods]
    assert codes == [75, 75, 75]
    first, second, third = (json.loads(each.termination_log.read_text())["problems"][0]["cause"] for each in pods)
    assert first == "node 2 of 3 did not come within 6 s"
    assert f"the pod that leads, {LEADER} (localhost:{meeting}), did not let this one start within 9 s: " in second
    assert "this is qwen-0-0-abcdef, not qwen-0-0-zyxwvu" in third


def test_a_pod_that_waits_ends_when_it_is_told_to(kind: Kind, site: Site, models: Models):
    if kind.name == VLLM:
        pytest.skip("launchers meet before any engine is started")
    meeting, master = free_ports(2)
    nodes = {"count": 2, "meetingPort": meeting, "masterPort": master, "waitSeconds": 600}
    for node in range(NODES):
        of_node = Kind(kind.name, kind.environ | place(node))
        name, base = f"{kind.name}-waiting-{node}", models.folder(0)
        one = EngineProcess(of_node, site, name, base, models.root, nodes=nodes, tensorParallelSize=NODES)
        until(lambda one=one: '"event": "meeting"' in one.log(), END_S, "it waits")
        one.signal(signal.SIGTERM)
        assert one.wait(END_S) == 143
