"""What an engine runs on is told as the launcher saw it, and never keeps a guard from starting."""

import pytest

from rollfleet_engine.guard.adapting import on_host
from rollfleet_protocol.engine_config import HOST_ENV
from rollfleet_protocol.state import Facts, Host

FACTS = Facts(guard_version="1", engine="vllm", engine_version="0.27.1", model="m")


def test_the_launchers_words_are_in_the_facts() -> None:
    host = Host(platform="Ascend", software={"CANN": "9.1.0", "torch-npu": "2.10.0"}, chip="A2", npus=(4, 5))
    assert on_host(FACTS, {HOST_ENV: host.model_dump_json(by_alias=True)}).host == host


@pytest.mark.parametrize("text", ["", "{", "[]", '{"npus": ["x"]}', '{"software": 3}'])
def test_what_cannot_be_read_is_left_out(text: str) -> None:
    assert on_host(FACTS, {HOST_ENV: text}) == FACTS


def test_nobody_told() -> None:
    assert on_host(FACTS, {}).host == Host()
