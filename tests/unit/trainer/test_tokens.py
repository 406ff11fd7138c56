"""As whom a trainer sends, and what it shows to engines."""

import threading
from collections.abc import Iterator

import pytest

from rollfleet_trainer.background import Background
from rollfleet_trainer.errors import DeniedError, NotPossible
from rollfleet_trainer.tokens import RENEW_S, Tokens, chosen_account
from tests.support.memory_api import MemoryApi


def test_the_account_is_our_own_where_the_fleet_names_it():
    name = "system:serviceaccount:rl:grpo"
    assert chosen_account(name, "rl", ("grpo", "ppo")) == "grpo"
    for username, trainers in ((name, ("ppo",)), ("system:serviceaccount:other:grpo", ("grpo", "ppo")), (name, ())):
        with pytest.raises(NotPossible, match=r"spec\.trainers"):
            chosen_account(username, "rl", trainers)


def test_a_person_sends_as_the_only_trainer():
    assert chosen_account("kubernetes-admin", "rl", ("grpo",)) == "grpo"
    with pytest.raises(NotPossible, match="grpo, ppo"):
        chosen_account("kubernetes-admin", "rl", ("grpo", "ppo"))


@pytest.fixture
def background() -> Iterator[Background]:
    one = Background("test")
    yield one
    one.close()


def test_a_token_is_for_one_engine_and_shown_for_half_of_its_life(background: Background):
    api, now = MemoryApi(), [0.0]
    tokens = Tokens(api, background, ("rl", "grpo"), lambda: now[0])
    assert tokens.bearer("a") == "token for a"
    assert tokens.bearer("b") == "token for b"
    now[0] = RENEW_S - 1
    tokens.bearer("a")
    assert api.audiences == ["a", "b"]
    now[0] = RENEW_S
    tokens.bearer("a")
    assert api.audiences == ["a", "b", "a"]
    assert {path for _, path in api.requests} == {"/api/v1/namespaces/rl/serviceaccounts/grpo/token"}


def test_what_engines_may_have_refused_is_not_shown_again(background: Background):
    """Of an account that was made again under its name every token of before is refused, for as long as it lives."""
    api = MemoryApi()
    tokens = Tokens(api, background, ("rl", "grpo"), lambda: 0.0)
    tokens.bearer("a")
    api.token = lambda audience: f"new token for {audience}"
    assert tokens.bearer("a") == "token for a"
    tokens.forget()
    assert tokens.bearer("a") == "new token for a"


def test_tokens_are_made_ready_together_and_those_of_engines_that_went_are_forgotten(background: Background):
    api = MemoryApi()
    tokens = Tokens(api, background, ("rl", "grpo"), lambda: 0.0)
    background.run(tokens.prepare(["a", "b", "c"]))
    assert sorted(api.audiences) == ["a", "b", "c"]
    background.run(tokens.prepare(["b", "d"]))
    assert sorted(api.audiences) == ["a", "b", "c", "d"]
    tokens.bearer("a")
    assert sorted(api.audiences) == ["a", "a", "b", "c", "d"]
    api.failing = lambda *_: DeniedError("serviceaccounts/token is forbidden")
    with pytest.raises(DeniedError):
        background.run(tokens.prepare(["e"]))


def test_engines_threads_ask_at_once(background: Background):
    api, got = MemoryApi(), []
    tokens = Tokens(api, background, ("rl", "grpo"), lambda: 0.0)
    threads = [threading.Thread(target=lambda each=each: got.append(tokens.bearer(str(each)))) for each in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(got) == sorted(f"token for {each}" for each in range(20))
