"""How an update is followed to its end, and what its end is held against."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import looptime
import pytest

from rollfleet_protocol.senders import MESSAGE_ANNOTATION, OFFERS_ANNOTATION
from rollfleet_trainer import RolloutFleet, UpdateFailed
from rollfleet_trainer import ranks as ranks_module
from rollfleet_trainer.apiserver import ApiServer
from rollfleet_trainer.background import Background, Worker
from rollfleet_trainer.control import AGAIN_S
from rollfleet_trainer.driving import Driver, Run
from rollfleet_trainer.errors import (
    ApiServerError,
    DeniedError,
    NotFoundError,
    NotPossible,
    TrainerError,
    UnauthorizedError,
    UnreachableError,
)
from rollfleet_trainer.looks import Look, Standing
from rollfleet_trainer.ranks import Word
from rollfleet_trainer.updates import Progress
from rollfleet_trainer.versions import Wish
from tests.support.memory_api import ENGINE_PATH, LEASE_PATH, POLICY_PATH, MemoryApi, conditions, fleet


@pytest.fixture
def api() -> MemoryApi:
    return fleet()


@pytest.fixture
def driver(api: MemoryApi) -> Iterator[Driver]:
    one = RolloutFleet("rl/qwen", service_account="grpo")
    assert one._driver is not None
    one._driver.control._api = api  # type: ignore[assignment]
    yield one._driver
    one.blocking.close()


def asked(driver: Driver) -> Run:
    run = driver._ask(Wish(), None)
    driver._background.run(driver.control.end())
    return run


SENT_FOR = {"Accepted": True, "Quiesced": True, "Transferred": False, "Verified": False, "Active": False}


def test_the_same_version_again_is_offered_once_the_attempt_before_has_ended(driver: Driver, api: MemoryApi):
    """An offer that went and came back at once would look to the operator as if nothing had happened."""
    asked(driver)
    sender = {"holder": api.objects[LEASE_PATH]["spec"]["holderIdentity"]}
    api.put_status(POLICY_PATH, phase="Transferring", epoch=4, sender=sender, conditions=conditions(**SENT_FOR))
    run = driver._ask(Wish(version=1), None)
    assert OFFERS_ANNOTATION not in annotations(api)
    assert "asked for anew" in annotations(api)[MESSAGE_ANNOTATION]
    assert driver._next(run).standing is Standing.WAITING
    assert OFFERS_ANNOTATION not in annotations(api)
    ended = conditions(**{**SENT_FOR, "Quiesced": False})
    api.put_status(POLICY_PATH, phase="Preparing", epoch=4, attempt=2, sender=None, conditions=ended)
    assert driver._next(run).attempt == 2
    assert annotations(api)[OFFERS_ANNOTATION] == "uid-qwen-policy/1"
    api.put_status(POLICY_PATH, phase="Transferring", epoch=5, sender=sender, conditions=conditions(**SENT_FOR))
    look = next(look for _ in range(15) if (look := driver._next(run)).epoch == 5)  # each waits two seconds at most
    assert look.standing is Standing.READY


def test_a_version_whose_sender_was_another_is_offered_at_once(driver: Driver, api: MemoryApi):
    asked(driver)
    sender = {"holder": "grpo/another"}
    api.put_status(POLICY_PATH, phase="Transferring", epoch=4, sender=sender, conditions=conditions(**SENT_FOR))
    run = driver._ask(Wish(version=1), None)
    assert annotations(api)[OFFERS_ANNOTATION] == "uid-qwen-policy/1"
    assert driver._next(run).standing is Standing.WAITING


def annotations(api: MemoryApi) -> dict[str, str]:
    found: dict[str, str] = api.objects[LEASE_PATH]["metadata"].get("annotations", {})
    return found


@pytest.mark.parametrize("written", [True, False], ids=["ours", "another's"])
def test_an_answer_that_is_lost_tells_nothing_of_who_wrote(driver: Driver, api: MemoryApi, written: bool):
    """A person may have asked for the same number, from a checkpoint, and with no label either."""
    asked(driver)
    api.put_status(POLICY_PATH, phase="Active")
    theirs = {"version": 2, "source": {"type": "Checkpoint", "checkpoint": {"path": "step-2"}}}
    ours = {"version": 2, "source": {"type": "Trainer"}}

    def lost(method: str, path: str) -> ApiServerError | None:
        if (method, path) != ("PATCH", POLICY_PATH):
            return None
        api.change(path, {"spec": ours if written else theirs})
        return UnreachableError("no answer")

    api.failing = lost
    if written:
        assert driver._ask(Wish(), None).asked.version == 2
        driver._background.run(driver.control.end())
        return
    with pytest.raises(UnreachableError, match="no answer"):
        driver._ask(Wish(), None)


def serves(driver: Driver, api: MemoryApi, digest: str) -> None:
    """The operator has committed it."""
    api.put_status(POLICY_PATH, version=1, phase="Active", digest=digest, digestSource="Trainer")
    driver.control._weight_version = api.objects[POLICY_PATH]


def test_a_fleet_that_serves_other_weights_than_were_sent_is_told(driver: Driver, api: MemoryApi):
    """Engines and operator may all believe a guard that lies, or compares nothing."""
    run = asked(driver)
    serves(driver, api, "sha256:aa")
    run.digest = "sha256:bb"
    with pytest.raises(
        UpdateFailed, match="version 1: the fleet serves sha256:aa, and this trainer sent sha256:bb"
    ) as told:
        driver._updated(run)
    assert told.value.reason == "DigestDisagrees"


@pytest.mark.parametrize("sent", ["sha256:aa", ""])
def test_what_was_sent_is_what_is_served_or_is_not_known(driver: Driver, api: MemoryApi, sent: str):
    """Not known: an engine's last answer was lost, and the operator judged by what it says of itself."""
    run = asked(driver)
    serves(driver, api, "sha256:aa")
    run.digest = sent
    assert driver._updated(run).digest == "sha256:aa"


@pytest.mark.parametrize("version", [None, 7])
def test_a_version_that_is_kept_for_another_account_is_not_asked_for(
    driver: Driver, api: MemoryApi, version: int | None
):
    """The operator would wait for that one, up to prepareSeconds, and fail the version."""
    source = {"type": "Trainer", "trainer": {"serviceAccountName": "ppo"}}
    spec = {"engineRef": {"name": "qwen"}, "version": 7, "source": source}
    api.put(POLICY_PATH, {"metadata": {"namespace": "rl", "name": "qwen-policy"}, "spec": spec})
    with pytest.raises(NotPossible, match="serviceAccountName is 'ppo', this trainer sends as 'grpo'"):
        driver._ask(Wish(version=version), None)
    assert api.objects[POLICY_PATH]["spec"] == spec
    spec["source"]["trainer"] = {"serviceAccountName": "grpo"}
    api.put(POLICY_PATH, api.objects[POLICY_PATH] | {"spec": spec})
    driver._ask(Wish(version=version), None)


TOKEN_PATH = "/api/v1/namespaces/rl/serviceaccounts/grpo/token"
FOLLOWED = [("GET", POLICY_PATH), ("WATCH", POLICY_PATH), ("POST", TOKEN_PATH)]


def refusing(method: str, path: str, error: ApiServerError) -> Callable[[str, str], ApiServerError | None]:
    return lambda *asked: error if asked == (method, path) else None


@pytest.mark.parametrize("right", FOLLOWED)
@pytest.mark.parametrize("before", [False, True])
def test_a_right_that_is_needed_later_only_is_missed_before_a_version_is_asked_for(
    driver: Driver, api: MemoryApi, right: tuple[str, str], before: bool
):
    """It would wait for a sender that cannot send: after a pause, closed."""
    if before:
        spec = {"engineRef": {"name": "qwen"}, "version": 7, "source": {"type": "Trainer", "trainer": {}}}
        api.put(POLICY_PATH, {"metadata": {"namespace": "rl", "name": "qwen-policy"}, "spec": spec})
    held = api.objects.get(POLICY_PATH)
    api.failing = refusing(*right, DeniedError("forbidden"))
    for _ in range(2):
        with pytest.raises(DeniedError, match="forbidden"):
            driver._ask(Wish(), None)
    assert api.objects.get(POLICY_PATH) == held
    assert not api.objects[LEASE_PATH]["spec"].get("holderIdentity"), "nothing was done"
    api.failing = lambda *_: None
    assert asked(driver).asked.version == (8 if before else 1)


def test_rights_are_tried_with_the_first_update_and_after_one_that_failed(driver: Driver, api: MemoryApi):
    tries = []
    for message in ("", "", "it failed", ""):
        api.audiences.clear()
        driver._ask(Wish(), None)
        tries.append(len(api.audiences))
        driver._background.run(driver.control.end(message))
    assert tries == [1, 0, 0, 1]


class Weights:
    def go_through(self) -> Iterator[object]:
        return iter(())

    def nbytes(self, *, alone: bool) -> int:
        return 0

    def require_another_pass(self) -> None:
        """As often as is wanted."""

    def require_sendable(self, *, alone: bool) -> None:
        """They can be; nobody knows them beforehand."""


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (DeniedError("forbidden"), DeniedError, "rl/qwen: version 1: it cannot be followed any more: forbidden"),
        (NotFoundError("gone"), NotPossible, "rl/qwen: version 1: WeightVersion qwen-policy was deleted"),
    ],
)
def test_an_update_that_cannot_be_followed_any_more_ends_and_offers_nothing(
    driver: Driver, api: MemoryApi, error: ApiServerError, raised: type[Exception], words: str
):
    """A live Lease with an offer would hold the fleet closed for as long as the trainer lives."""

    def withdraw(_: Progress) -> None:
        if not api.objects[LEASE_PATH]["metadata"].get("annotations"):
            return
        api.failing = lambda method, path: error if path == POLICY_PATH and method != "PATCH" else None
        api.end_watches()

    with pytest.raises(raised, match=words):
        driver.update(Weights(), Wish(), withdraw)  # type: ignore[arg-type]
    told = api.objects[LEASE_PATH]["metadata"]["annotations"]
    assert list(told) == [MESSAGE_ANNOTATION]
    assert words in told[MESSAGE_ANNOTATION]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DeniedError("grpo cannot get qwen"), "^grpo cannot get qwen; or there is no fleet rl/qwen$"),
        (UnauthorizedError("who is it?"), r"^who is it\?$"),
        (NotFoundError("HTTP 404"), "^there is no fleet rl/qwen: HTTP 404$"),
    ],
)
def test_a_fleet_s_name_that_may_be_wrong_is_told(driver: Driver, api: MemoryApi, error: ApiServerError, words: str):
    """A Role of one fleet's name refuses all others, whether they are there or not."""
    api.failing = refusing("GET", ENGINE_PATH, error)
    for call in (driver.spec, driver.serves):
        with pytest.raises(type(error), match=words):
            call()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"weightTransfer": None}, r"has no spec\.weightTransfer\.backend;"),
        ({"trainers": []}, r"has no spec\.trainers;"),
        ({"trainers": None, "weightTransfer": None}, r"has no spec\.trainers and spec\.weightTransfer\.backend;"),
    ],
)
def test_a_fleet_that_takes_no_pushes_is_told_with_all_that_it_lacks(
    driver: Driver, api: MemoryApi, spec: dict[str, Any], words: str
):
    api.change(ENGINE_PATH, {"spec": spec})
    with pytest.raises(NotPossible, match=f"rl/qwen takes no pushes: its RolloutEngine {words} docs/trainer.md says"):
        driver._ask(Wish(), None)


def test_an_account_that_is_none_of_the_trainers_is_told_with_those(driver: Driver, api: MemoryApi):
    driver.control._service_account = "ppo"
    with pytest.raises(NotPossible, match=r"'ppo' is none of spec\.trainers \(grpo\)"):
        driver._ask(Wish(), None)


def test_after_a_failure_nothing_of_the_way_to_the_engines_is_used_again(driver: Driver, api: MemoryApi):
    run = asked(driver)
    tokens = driver.control.tokens
    assert tokens is not None
    assert tokens.bearer("a") == "token for a"
    api.token = lambda audience: f"new token for {audience}"
    with pytest.raises(NotPossible, match="caBundle"):
        driver._send(run, Look(Standing.READY, epoch=3), Weights())  # type: ignore[arg-type]
    assert tokens.bearer("a") == "new token for a"


def test_whoever_calls_at_the_moment_of_the_end_is_not_left_waiting():
    async def never() -> None:
        await asyncio.Event().wait()

    def call(one: Background) -> str:
        try:
            one.run(never())
        except (NotPossible, CancelledError) as error:
            return type(error).__name__
        return ""

    with ThreadPoolExecutor(8) as pool:
        for _ in range(30):
            one = Background("closing")
            calls = [pool.submit(call, one) for _ in range(8)]
            one.close()
            assert {each.result(timeout=30) for each in calls} <= {"NotPossible", "CancelledError"}


def test_a_watch_that_ends_at_once_is_not_asked_for_without_end(driver: Driver, api: MemoryApi):
    """Something between may close what stays open."""

    class Ending:
        gets = 0

        async def get(self, _path: str) -> dict[str, Any]:
            self.gets += 1
            return api.objects[POLICY_PATH]

        async def watch(self, *_: str) -> AsyncIterator[dict[str, Any]]:
            for news in ():
                yield news

    run, ending = asked(driver), Ending()

    async def follow() -> None:
        async with asyncio.timeout(20.25 * AGAIN_S):
            await driver.control._follow(ending, run.asked)  # type: ignore[arg-type]

    with closing(looptime.new_event_loop()) as loop, pytest.raises(TimeoutError):
        loop.run_until_complete(follow())
    assert ending.gets == 21


@pytest.mark.parametrize("line", [b"<html>", b"[]", b"{}", b'{"type": "ADDED"}'])
async def test_what_is_no_event_of_a_watch_is_an_api_server_that_is_away(line: bytes, monkeypatch: pytest.MonkeyPatch):
    class Content:
        async def iter_any(self) -> AsyncIterator[bytes]:
            yield line + b"\n"

    async def answer(*_: object) -> SimpleNamespace:
        return SimpleNamespace(response=SimpleNamespace(content=Content(), close=lambda: None))

    server = ApiServer(None, None)
    monkeypatch.setattr(server, "_answer", answer)
    with pytest.raises(UnreachableError, match="is no event"):
        async for _ in server.watch("/weightversions", "qwen-policy", "1"):
            pass


class Deaf:
    """A rank that hears these words."""

    def __init__(self, *words: tuple[Word, Any]) -> None:
        self.left = list(words)

    def hear(self) -> tuple[Word, Any]:
        return self.left.pop(0)


class Refused:
    """Weights of which every rank refuses one in the middle."""

    def go_through(self) -> Iterator[Any]:
        yield "w", b"", True
        raise NotPossible("tensor _orig_mod.w: the model does not know '_orig_mod.'")


@pytest.mark.parametrize("end", [(Word.FAILED, TrainerError("rank 0: the same")), (Word.DONE, None)])
def test_a_rank_that_refuses_what_all_refuse_still_hears_the_end(end: tuple[Word, Any]) -> None:
    """Else the next update would hear the word that this one left behind."""
    ranks = Deaf((Word.WAIT, 1), (Word.SEND, None), end)
    with pytest.raises(TrainerError):
        ranks_module.follow(ranks, Refused(), lambda _: None)  # type: ignore[arg-type]
    assert ranks.left == []


def test_what_sends_works_in_a_child_of_a_fork_and_refuses_after_its_end() -> None:
    worker = Worker("sends")
    assert worker.submit(lambda: 1).result(10) == 1
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os._exit(0 if worker.submit(lambda: 2).result(10) == 2 else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.shutdown()
    with pytest.raises(RuntimeError, match="was closed"):
        worker.submit(lambda: 3)
