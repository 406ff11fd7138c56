"""A whole run over engines in memory: in waves, with some that cannot be asked, an update in between, no time left."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollfleet_cli.bumping import Scene
from rollfleet_cli.cluster import Access, Cluster
from rollfleet_cli.conformance import conducting, updating
from rollfleet_cli.conformance.checks.catalogue import CHECKS, UPDATE_CHECKS
from rollfleet_cli.conformance.checks.wire import Identity
from rollfleet_cli.conformance.choosing import Chosen
from rollfleet_cli.conformance.conducting import NOT_ASKED, Order, conduct
from rollfleet_cli.conformance.reaching import Credentials, Reached, UnfitError, config_in
from rollfleet_cli.conformance.report import Report, to_markdown
from rollfleet_cli.conformance.running import Result
from rollfleet_cli.errors import ForbiddenError, NotPossibleError, UnreachableError
from rollfleet_operator.api.meta import ANNOTATION_LEADER
from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.clients.errors import Denied, Unreachable
from rollfleet_operator.clients.tokens import Tokens
from rollfleet_protocol.engine_config import ENGINE_CONFIG_ENV, EngineConfig, NodesConfig
from tests.support.cli import NOW, make_fleet, make_version
from tests.support.honest_engine import CONFIG, STATE, VERSION, HonestEngine, make_subject

DIGEST = "sha256:d"


class Minted:
    """Tokens, until one is refused."""

    def __init__(self, *, refuses: Exception | None = None) -> None:
        self.refuses = refuses

    async def bearer(self, audience: str) -> str:
        if self.refuses is not None:
            raise self.refuses
        return "eyJhbGciOiJFUzI1NiIsImtpZCI6ImsifQ.eyJleHAiOjF9.c2ln"


def credentials(operator: Minted | None = None, other: Minted | None = None) -> Credentials:
    return Credentials(cast(Tokens, operator or Minted()), cast(Tokens, other or Minted()), "rollfleet.io/rl/qwen")


class Way:
    """Reaches engines in memory."""

    def __init__(self, broken: tuple[str, ...], config: EngineConfig) -> None:
        self.broken = broken
        self.config = config
        self.open = self.most = 0

    async def reach(self, stack: AsyncExitStack, pod: dict[str, Any]) -> Reached:
        name = pod["metadata"]["name"]
        if name in self.broken:
            raise UnfitError("it has no address: its phase is Pending")
        self.open += 1
        self.most = max(self.most, self.open)
        stack.callback(self.close)
        return Reached(pod, make_subject(pod=name, config=self.config), cast(Any, HonestEngine()), credentials())

    def close(self) -> None:
        self.open -= 1


class Objects:
    """What the API server says of the fleet."""

    def __init__(
        self, *, committed: tuple[int, ...] = (VERSION,), checkpoint: str | None = None,
        pods: list[dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.committed = list(committed)
        self.checkpoint = checkpoint
        self.pods = pods

    def scene(self) -> Scene:
        version = self.committed.pop(0) if len(self.committed) > 1 else self.committed[0]
        held = Committed(version=version, digest=DIGEST, checkpoint=self.checkpoint, time=NOW)
        return Scene(make_fleet(committed=held, serving_replicas=2), make_version(version))

    def object(self, *_: object) -> dict[str, Any]:
        raise ForbiddenError("nodes")

    def objects(self, *_: Any, **__: str) -> list[dict[str, Any]]:
        if self.pods is None:
            raise ForbiddenError("pods")
        return self.pods


async def run(
    monkeypatch: pytest.MonkeyPatch, count: int = 3, *, objects: Objects | None = None, broken: tuple[str, ...] = (),
    within_s: float = 60.0, disruptive: bool = False, at_once: int = 32, config: EngineConfig = CONFIG,
) -> tuple[Report, Way]:  # fmt: skip
    found, way = objects or Objects(), Way(broken, config)

    @asynccontextmanager
    async def reacher(*_: object) -> AsyncIterator[Way]:
        yield way

    monkeypatch.setattr(conducting, "reacher", reacher)
    monkeypatch.setattr(conducting, "look_at", lambda *_: found.scene())
    monkeypatch.setattr(conducting, "AT_ONCE", at_once)
    pods = tuple(
        {"metadata": {"name": f"qwen-{n}", "namespace": "rl"}, "spec": {"containers": [{"name": "engine"}]}}
        for n in range(count)
    )
    order = Order(Access(), "rl", "qwen", Chosen(pods, count, "all"), "direct", within_s, disruptive)
    return await conduct(order, cast(Cluster, found), found.scene(), lambda _: None), way


def results(report: Report) -> dict[str, str]:
    return {row.check: row.result for row in report.checks}


async def test_every_check_has_a_row_and_an_honest_fleet_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    report, way = await run(monkeypatch)
    assert list(results(report)) == list(CHECKS)
    skipped = {row.check: row.skipped for row in report.checks if row.result != Result.PASSED}
    assert skipped == {check.id: NOT_ASKED for check in UPDATE_CHECKS}
    assert (report.complete, len(report.engines), way.open) == (True, 3, 0)
    assert {row.engines for row in report.checks if row.result == Result.PASSED} == {3}


async def test_an_engine_of_several_nodes_is_told_with_all_of_its_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG.model_copy(update={"nodes": NodesConfig(count=2), "tensor_parallel_size": 2})
    owned = {"controller": True, "uid": make_fleet().metadata.uid}

    def follower(name: str, leader: str, node: str) -> dict[str, Any]:
        metadata = {"name": name, "annotations": {ANNOTATION_LEADER: leader}, "ownerReferences": [owned]}
        return {"metadata": metadata, "spec": {"nodeName": node}}

    objects = Objects(pods=[follower("qwen-0-1-x", "qwen-0", "node-7"), follower("qwen-1-1-x", "qwen-1", "node-8")])
    report, _ = await run(monkeypatch, 2, objects=objects, config=config)
    assert [record.followers for record in report.engines] == [{"qwen-0-1-x": "node-7"}, {"qwen-1-1-x": "node-8"}]
    assert report.asked_for["nodes"]["count"] == 2
    assert "qwen-0-1-x on node-7" in to_markdown(report)
    blind, _ = await run(monkeypatch, 1, config=config)
    assert blind.engines[0].followers == {}, "pods may not be listed there"


async def test_a_large_fleet_is_asked_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    report, way = await run(monkeypatch, 7, at_once=3)
    assert (way.most, way.open, len(report.engines)) == (3, 0, 7)
    assert {row.engines for row in report.checks if row.result == Result.PASSED} == {7}


async def test_who_cannot_be_asked_is_told_and_nobody_is_not_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = await run(monkeypatch, broken=("qwen-1",))
    assert report.unreached == {"qwen-1": "it has no address: its phase is Pending"}
    assert (report.complete, report.failed) == (False, ())
    with pytest.raises(NotPossibleError, match="qwen-0: it has no address"):
        await run(monkeypatch, 1, broken=("qwen-0",))


async def test_engines_are_not_compared_over_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = await run(monkeypatch, objects=Objects(committed=(VERSION, VERSION, VERSION + 1)))
    assert results(report)["same-weights"] == Result.SKIPPED
    assert not report.complete


async def test_engines_that_hold_another_version_than_the_commit_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = await run(monkeypatch, objects=Objects(committed=(VERSION + 1,)))
    assert [row.check for row in report.failed] == ["same-weights"]


async def test_what_there_is_no_time_for_is_skipped_and_the_run_is_not_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report, _ = await run(monkeypatch, within_s=-1.0, disruptive=True, objects=Objects(checkpoint="step-7"))
    assert {name for name, result in results(report).items() if result != Result.SKIPPED} <= {
        "same-weights",
        "same-answers",
        "same-releases",
    }
    assert not report.complete


async def test_there_must_be_something_to_move_to(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = await run(monkeypatch, disruptive=True)
    reasons = {row.skipped for row in report.checks if row.check.startswith("update-")}
    assert reasons == {"the committed version has no stored checkpoint: it was loaded at start, or pushed"}
    assert report.complete


async def test_an_update_that_may_not_be_asked_for_leaves_the_run_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise ForbiddenError("cannot patch resource")

    monkeypatch.setattr(updating, "ask_for", forbidden)
    monkeypatch.setattr(updating, "SETTLE_S", 0.0)
    report, way = await run(monkeypatch, disruptive=True, objects=Objects(checkpoint="step-7"))
    assert any("cannot patch resource" in row.skipped for row in report.checks)
    assert (report.complete, report.failed, way.open) == (False, (), 0)


async def test_tokens_that_cannot_be_had_are_told() -> None:
    made = credentials(other=Minted(refuses=Denied("may not create serviceaccounts/token")))
    token, found = await made.bearers()
    assert found is not None
    assert set(found) == set(Identity) - {Identity.NOBODY, Identity.OTHER_ACCOUNT}
    assert "may not create" in made.missing[Identity.OTHER_ACCOUNT]
    assert (await made.bearers(token))[1] is None, "nothing is forged anew of the same token"
    with pytest.raises(Unreachable):
        await credentials(Minted(refuses=Unreachable("gone"))).bearers()


def test_an_engine_of_another_release_is_not_asked() -> None:
    def pod(text: str) -> dict[str, Any]:
        return {"spec": {"containers": [{"env": [{"name": ENGINE_CONFIG_ENV, "value": text}]}]}}

    assert config_in(pod(CONFIG.model_dump_json(by_alias=True))) == CONFIG
    with pytest.raises(UnfitError, match="another release"):
        config_in(pod('{"of": "later"}'))
    with pytest.raises(UnfitError, match="no engine"):
        config_in({"spec": {"containers": [{}]}})


def test_the_state_of_the_honest_engine_is_the_commits() -> None:
    assert (STATE.weights.version, STATE.weights.digest) == (VERSION, DIGEST)


async def test_an_api_server_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception | SimpleNamespace] = [
        UnreachableError("reset by peer"),
        SimpleNamespace(serving=1, desired=2, state="Updating", message="one engine is left"),
        UnreachableError("reset by peer"),
        SimpleNamespace(serving=2, desired=2, state="Serving", message=""),
    ]

    def look(*_: object) -> SimpleNamespace:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(updating, "look", look)
    monkeypatch.setattr(updating, "has_reached", lambda *_, **__: True)
    monkeypatch.setattr(updating, "LOOK_S", 0.0)
    monkeypatch.setattr(updating, "_place", lambda scene: scene)
    scene: Any = ("rl", "qwen")
    cluster: Any = None
    assert await updating._until_served(cluster, scene, 7, 60) == ""
    assert answers == []
    monkeypatch.setattr(updating, "GIVE_UP_S", -1.0)
    answers.append(UnreachableError("reset by peer"))
    assert await updating._until_served(cluster, scene, 7, 60) == "reset by peer"
