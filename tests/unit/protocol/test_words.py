"""What others say is shown as text, and steers nobody's terminal."""

import json

import pytest
from pydantic import ValidationError

from rollfleet_operator.clients.errors import MAX_TEXT, clipped
from rollfleet_operator.core.conditions import clip
from rollfleet_protocol.refusals import Refusal, RefusalDetail, RefusalReason
from rollfleet_protocol.state import Failure, FailureReason
from rollfleet_protocol.words import MAX_WORDS, visible, visible_json

HOSTILE = {
    "colour": ("\x1b[31mred", "\\x1b[31mred"),
    "title of the window": ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
    "back over what was said": ("ok\rbad\x08", "ok\\x0dbad\\x08"),
    "C1": ("\x9b2J", "\\x9b2J"),
    "zero": ("a\x00b", "a\\x00b"),
    "read backwards": ("\u202etxt.exe\u2066", "\\u202etxt.exe\\u2066"),
    "half a pair": ("\ud800", "\\ud800"),
    "a line that is none": ("a\u2028b", "a\\u2028b"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_steers_a_terminal_is_written_out(case: str) -> None:
    said, shown = HOSTILE[case]
    assert visible(said) == clipped(said) == shown
    assert Failure(reason=FailureReason.PROBE_FAILED, message=said).message == shown
    assert not set(clip(said)) & set(map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0xD800)))


@pytest.mark.parametrize("case", HOSTILE)
def test_lines_of_json_say_the_same_and_steer_nothing(case: str) -> None:
    said, _ = HOSTILE[case]
    line = visible_json(json.dumps({"message": said}, ensure_ascii=False))
    assert visible(line) == line
    assert json.loads(line) == {"message": said}
    assert Refusal.model_validate_json(
        Refusal(error=RefusalDetail(message=said, code=401, reason=RefusalReason.UNAUTHENTICATED)).model_dump_json()
    ).error.message == visible(said)


def test_ordinary_words_stay_as_they_are() -> None:
    text = "Gewichte für Qwen3 权重 🚀\n\tnext line"
    assert visible(text) == clipped(text) == text


@pytest.mark.parametrize("length", [MAX_WORDS - 1, MAX_WORDS, MAX_WORDS + 1, 10 * MAX_WORDS])
@pytest.mark.parametrize("letter", ["a", "\x1b"])
def test_words_are_bounded_whatever_they_are(letter: str, length: int) -> None:
    words = Failure(reason=FailureReason.PROBE_FAILED, message=letter * length).message
    assert len(words) == min(length * len(visible(letter)), MAX_WORDS)
    assert words.endswith("…") == (length * len(visible(letter)) > MAX_WORDS)
    assert len(clipped(letter * length)) == MAX_TEXT


def test_a_name_must_be_text() -> None:
    with pytest.raises(ValidationError):
        Failure.model_validate_json('{"reason": "ProbeFailed", "message": 7}')
