import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.log_lines import json_lines, whole_lines

VALUES = st.dictionaries(st.text(), st.text() | st.integers(), max_size=3)


@given(st.lists(VALUES), st.booleans(), st.data())
def test_a_log_read_at_any_moment_gives_the_lines_written_so_far(
    entries: list[dict[str, Any]], ascii_only: bool, data: st.DataObject
) -> None:
    text = "".join(f"(EngineCore pid=7) {json.dumps(each, ensure_ascii=ascii_only)}\n" for each in entries)
    length = data.draw(st.integers(0, len(text)))
    assert json_lines(text[:length]) == entries[: text[:length].count("\n")]


def test_only_lines_with_a_mark_are_read() -> None:
    text = 'starting\n{"event": "plan"}\n{"event": "fault"}\nfault\n{"event": "fa'
    assert json_lines(text, '"fault"', '"told"') == [{"event": "fault"}]
    assert whole_lines(text)[-1] == "fault"
    assert json_lines("") == whole_lines("") == []
