"""TRL's client over a fleet: its methods, what becomes of its arguments, what is refused.

Updates need torch: tests/contract/test_trl.py. TRL itself: tests/trl.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest

from rollfleet_engine.simulator.tokens import encode
from rollfleet_trainer import RolloutFleet
from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.passing import SPENT, Handed
from rollfleet_trainer.ranks import Ranks
from rollfleet_trainer.rollout_errors import NotServedError, RefusedError, VersionPassedError
from rollfleet_trainer.rollouts import Rollouts
from rollfleet_trainer.samples import Sample
from rollfleet_trainer.trl import WHERE, FleetClient, vllm_client_replaced
from rollfleet_trainer.trl_sampling import Wish, batch_of
from rollfleet_trainer.updates import Update
from tests.support.memory_api import fleet as memory_fleet
from tests.support.scripted_fleet import Event, ScriptedFleet
from tests.support.trl_surface import signature_of, surface_of, table

Make = Callable[..., FleetClient]


def rollouts(transport: httpx.AsyncBaseTransport, on_abort: str = "restart", **options: Any) -> Rollouts:
    return Rollouts("http://qwen:8000", model="policy", on_abort=on_abort, transport=transport, **options)


def fleet(**spec: Any) -> RolloutFleet:
    """Whose cluster is in memory."""
    one = RolloutFleet("rl/qwen", service_account="grpo")
    assert one._driver is not None
    one._driver.control._api = memory_fleet(**spec)  # type: ignore[assignment]
    return one


@pytest.fixture
def make() -> Iterator[Make]:
    """Clients that are closed at the end."""
    made: list[FleetClient] = []

    def client(transport: httpx.AsyncBaseTransport | None = None, **options: Any) -> FleetClient:
        spec = options.pop("spec", {})
        on_abort = options.pop("on_abort", "restart")
        made.append(FleetClient(fleet(**spec), rollouts(transport or ScriptedFleet(), on_abort, **options)))
        return made[-1]

    yield client
    for each in made:
        each.close_communicator()


# --- the surface


def test_methods_and_arguments_are_trls():
    """Checked in with its source; `make check-trl` compares it with the installed TRL."""
    ours = surface_of(FleetClient)
    assert "trl 1.16.0" in table()["source"]
    assert {name: ours.get(name) for name in table()["methods"]} == table()["methods"]


class Theirs:
    """TRL's own client, in a module that stands in for its."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(WHERE)
    module.VLLMClient, module.is_vllm_available = Theirs, lambda min_version=None: False  # type: ignore[attr-defined]
    for name in ("trl", "trl.generation"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, WHERE, module)
    monkeypatch.delenv("RANK", raising=False)
    return module


def test_a_trainer_that_is_made_inside_has_the_fleets_client(stand_in: ModuleType, make: Make):
    before = stand_in.is_vllm_available
    with vllm_client_replaced(lambda: make(Health([200]))):
        assert signature_of(stand_in.VLLMClient) == table()["made"]
        assert stand_in.is_vllm_available() is True
        client = stand_in.VLLMClient(base_url="http://0.0.0.0:8000", group_port=51216, connection_timeout=240.0)
    assert isinstance(client, FleetClient)
    assert client.model == "policy"
    assert (stand_in.VLLMClient, stand_in.is_vllm_available) == (Theirs, before)


def test_a_fleet_that_cannot_be_reached_is_told_at_once_and_left(stand_in: ModuleType, make: Make):
    made: list[FleetClient] = []

    def one() -> FleetClient:
        made.append(make(Health([404])))
        return made[-1]

    with (
        pytest.raises(ConnectionError, match=r"http://qwen:8000/health: HTTP 404: no such thing"),
        vllm_client_replaced(one),
    ):
        stand_in.VLLMClient(connection_timeout=0.0)
    assert stand_in.VLLMClient is Theirs
    with pytest.raises(NotPossible, match="closed"):
        made[0].generate(["x"])


def test_trainers_that_ask_for_no_client_are_told_so_on_the_main_process(
    stand_in: ModuleType, make: Make, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(NotPossible, match="use_vllm=True"), vllm_client_replaced(make):
        pass
    monkeypatch.setitem(os.environ, "RANK", "3")
    with vllm_client_replaced(make):
        pass
    assert stand_in.VLLMClient is Theirs


def test_another_trl_is_told(stand_in: ModuleType, make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(stand_in, "VLLMClient")
    with pytest.raises(NotPossible, match="no VLLMClient: this TRL is another one than"), vllm_client_replaced(make):
        pass
    monkeypatch.setitem(sys.modules, WHERE, None)
    with pytest.raises(NotPossible, match="cannot be imported"), vllm_client_replaced(make):
        importlib.import_module(WHERE)


# --- the server


class Health(httpx.AsyncBaseTransport):
    """Answers one after the other; 0 is no connection."""

    def __init__(self, answers: list[int]) -> None:
        self.answers = answers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/health"
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not answer:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(answer, text="no such thing")


def test_a_server_that_starts_is_waited_for(make: Make):
    health = Health([0, 0, 500, 200])
    make(health).check_server(total_timeout=30.0, retry_interval=0.0)
    assert health.answers == [200]
    with pytest.raises(ConnectionError, match="after 0 s: http://qwen:8000/health: ConnectError: refused"):
        make(Health([0])).check_server()


def test_what_trl_asks_of_the_servers_configuration_is_told_by_the_fleet(make: Make):
    told = make(spec={"features": {"logprobs": {"mode": "processed_logprobs"}}}).get_server_info()
    assert told["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert told["weight_transfer_config"] == {"backend": "gloo"}
    bare = make(spec={"weightTransfer": None}).get_server_info()
    assert bare == {"model_config": {"logprobs_mode": "raw_logprobs"}, "weight_transfer_config": None}


def test_a_fleet_that_takes_no_weights_from_here_is_told_before_training(make: Make, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(NotPossible, match=r"has no spec\.weightTransfer\.backend, so it takes no pushes"):
        make(spec={"weightTransfer": None}).init_communicator()
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(NotPossible, match="'ipc': each rank of the trainer shares memory of its own NPU"):
        make(spec={"weightTransfer": {"backend": "ipc"}}).init_communicator()


def test_a_fleet_that_lets_others_send_only_is_told_before_training():
    one = fleet(trainers=[{"serviceAccountName": "another"}])
    client = FleetClient(one, rollouts(ScriptedFleet()))
    with pytest.raises(NotPossible, match=r"'grpo' is none of spec.trainers \(another\)"):
        client.init_communicator()
    client.close_communicator()


# --- samples


def test_each_prompt_has_its_samples_one_after_the_other(make: Make):
    scripted = ScriptedFleet()
    batch = make(scripted).generate(["What?", "Where is it?"], n=3, max_tokens=5)
    assert batch["prompt_ids"] == [list(encode("What?")), list(encode("Where is it?"))]
    assert [len(each) for each in batch["completion_ids"] or ()] == [5] * 6
    assert batch["logprob_token_ids"] == [[[token] for token in each] for each in batch["completion_ids"] or ()]
    assert {len(position) for each in batch["logprobs"] or () for position in each} == {1}
    assert batch["versions"] == [[1] * 5] * 6
    same = make(ScriptedFleet()).generate([list(encode("What?"))], max_tokens=5, logprobs=None)
    assert same["completion_ids"] == (batch["completion_ids"] or [])[:1]
    assert (same["logprobs"], same["logprob_token_ids"]) == (None, None)


def test_arguments_are_the_routes_and_generation_kwargs_come_last(make: Make):
    scripted = ScriptedFleet()
    more = {"seed": 7, "temperature": 0.5, "max_tokens": 2, "stop_token_ids": [3]}
    make(scripted).generate(["What?"], n=2, top_k=5, structured_outputs_regex="[0-9]+", generation_kwargs=more)
    assert {body.pop("seed") for body in scripted.bodies} == {7, 8}, "else all samples of a prompt were the same"
    assert scripted.bodies[0] == scripted.bodies[1]
    assert scripted.bodies[0] == {
        "model": "policy",
        "prompt": "What?",
        "repetition_penalty": 1.0,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 5,
        "min_p": 0.0,
        "max_tokens": 2,
        "structured_outputs": {"regex": "[0-9]+"},
        "stop_token_ids": [3],
        "logprobs": 0,
        "return_token_ids": True,
    }


def test_a_chat_is_rendered_by_the_engine(make: Make):
    scripted = ScriptedFleet()
    turns = [{"role": "user", "content": "Hello"}]
    tool = {"type": "function", "function": {"name": "look"}}
    batch = make(scripted).chat([turns, turns], max_tokens=4, tools=[tool], chat_template="{{ messages }}", n=2)
    assert len(batch["completion_ids"] or ()) == 4
    assert len(batch["prompt_ids"] or ()) == 2
    body = scripted.bodies[0]
    assert (body["messages"], body["tools"], body["tool_choice"]) == (turns, [tool], "none")
    assert body["chat_template"] == "{{ messages }}"
    assert "chat_template_kwargs" not in body


def test_no_more_conversations_at_once_than_are_asked_for(make: Make):
    class Counting(ScriptedFleet):
        now = most = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.now += 1
            self.most = max(self.now, self.most)
            try:
                return await super().handle_async_request(request)
            finally:
                self.now -= 1

    scripted = Counting()
    make(scripted).chat([[{"role": "user", "content": "Hello"}]] * 7, max_concurrent_requests=2)
    assert scripted.most <= 2
    assert len(scripted.bodies) == 7


def updated(client: FleetClient, version: int) -> None:
    client.update = Update(version, "", "", "Trainer", 0.0, 0.0)


def test_samples_after_a_sync_are_of_its_version(make: Make):
    scripted = ScriptedFleet(version=3, events=[Event("closed"), Event("answer")])
    client = make(scripted, hold_s=10.0)
    updated(client, 3)
    assert client.generate(["What?"], max_tokens=2)["versions"] == [[3, 3]]
    scripted.version = 4
    with pytest.raises(VersionPassedError):
        client.generate(["What?"])
    lagging = make(ScriptedFleet(version=2), hold_s=0.0)
    updated(lagging, 3)
    with pytest.raises(NotServedError):
        lagging.generate(["What?"])


def test_a_sample_that_another_version_ended_is_no_sample(make: Make):
    client = make(ScriptedFleet(events=[Event("abort", tokens=2), Event("answer", bump=1)]), on_abort="continue")
    updated(client, 1)
    with pytest.raises(VersionPassedError, match="went on from version 1 before a sample of it was finished"):
        client.generate(["What?"], max_tokens=5)


def test_one_that_fails_ends_the_others(make: Make):
    with pytest.raises(RefusedError, match="in the engine's own words"):
        make(ScriptedFleet(events=[Event("answer"), Event("400"), Event("closed")])).generate(["a", "b", "c", "d"])


def test_no_number_is_none():
    sample = Sample((1,), (2, 3), (math.nan, -1.0), (1, 1), "length", None, "", None, None, "qwen-0", 0)
    batch = batch_of([sample], Wish({"n": 1, "max_tokens": 2, "logprobs": 0}, None, None))
    assert batch["logprobs"] == [[[None], [-1.0]]]


# --- what is refused


def test_what_cannot_be_kept_is_refused_by_name(make: Make):
    client = make()
    refusals: list[tuple[str, Callable[[], Any]]] = [
        ("logprobs=5", lambda: client.generate(["a"], logprobs=5)),
        ("logprobs=1", lambda: client.chat([[{"role": "user", "content": "a"}]], generation_kwargs={"logprobs": 1})),
        ("image_features", lambda: client.image_features([None, [object()]])),
        ("image_features", lambda: client.generate([[1]], features=[{"mm_hashes": {}}])),
        ("image_pil", lambda: client.chat([[{"role": "user", "content": [{"type": "image_pil"}]}]])),
        ("get_world_size", client.get_world_size),
        ("get_sequence_logprobs", lambda: client.get_sequence_logprobs([[1, 2]], [1])),
        ("update_named_param: only inside", lambda: client.update_named_param("w", None)),  # type: ignore[arg-type]
        ("logprobs are asked for", lambda: make(logprobs=False).generate(["a"])),
        ("n is 0", lambda: client.generate(["a"], n=0)),
    ]
    for name, call in refusals:
        with pytest.raises(NotPossible, match=name):
            call()
    assert client.image_features([None, []]) == [None, None]
    assert client.generate([[1]], features=[None])["prompt_ids"] == [[1]]
    with pytest.raises(ValueError, match="best_of"):
        client.generate(["a"], generation_kwargs={"best_of": 3})
    with pytest.raises(ValueError, match="structured_outputs: cannot go on"):
        make(on_abort="continue").generate(["a"], structured_outputs_regex="[0-9]+")


def test_clients_that_cannot_be_of_trl_are_not_made(monkeypatch: pytest.MonkeyPatch):
    one = fleet()
    with pytest.raises(NotPossible, match="on_abort='return'"):
        FleetClient(one, rollouts(ScriptedFleet(), "return"))
    monkeypatch.setattr(one, "_ranks", _Two())
    with pytest.raises(NotPossible, match="TRL gathers by itself"):
        FleetClient(one, rollouts(ScriptedFleet()))
    monkeypatch.undo()
    one.blocking.close()


class _Two(Ranks):
    rank, size = 0, 2


# --- handing over


def test_tensors_are_handed_over_one_at_a_time_and_once():
    handed, taken = Handed(), []
    taker = threading.Thread(target=lambda: taken.extend(handed()))
    taker.start()
    for place in range(50):
        assert handed.put((str(place), None))  # type: ignore[arg-type]
    handed.end()
    taker.join(30)
    assert taken == [(str(place), None) for place in range(50)]
    with pytest.raises(NotPossible, match=SPENT[:20]):
        handed()


def test_who_hands_over_is_told_when_nobody_takes_and_who_takes_what_went_wrong():
    handed = Handed()
    assert handed.put(("first", None))  # type: ignore[arg-type]
    handed.over()
    assert not handed.put(("second", None))  # type: ignore[arg-type]
    broken = Handed()
    broken.fail(ValueError("the gather failed"))
    with pytest.raises(ValueError, match="the gather failed"):
        list(broken())
