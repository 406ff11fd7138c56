import copy
import json
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_trainer.said import Said, as_json, said

INFOS = st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.text()), max_size=5)


@given(INFOS)
def test_what_is_there_is_said_as_it_is(info: dict[str, Any]) -> None:
    one = Said(info)
    assert one == info
    assert json.loads(one.json) == {name: value for name, value in info.items() if value is not None}


def test_it_is_encoded_once_whoever_asks_first() -> None:
    one = Said({"names": [str(number) for number in range(1000)]})
    with ThreadPoolExecutor(8) as pool:
        found = [call.result() for call in [pool.submit(lambda: one.json) for _ in range(50)]]
    assert {id(each) for each in found} == {id(one.json)}
    assert said(one) is one


def test_what_json_has_no_word_for_is_refused() -> None:
    with pytest.raises(ValueError, match="handle"):
        _ = Said({"ipc_handles": b"a pickle"}).json
    with pytest.raises(TypeError, match="bytes is not JSON serializable"):
        _ = Said({"names": [b"w"]}).json
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json({"scale": float("nan")})


def test_a_client_may_hand_it_to_another_process() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(repr, Said({"names": ["w"]})).result(60) == "{'names': ['w']}"
    assert type(copy.deepcopy(Said({"names": ["w"]}))) is dict
