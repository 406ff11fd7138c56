"""Allocator settings and the merge of JSON settings: nothing of others is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_engine.launch.allocator import without_expandable_segments
from rollfleet_engine.launch.merge import differences, merge


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("expandable_segments:True", ""),
        ("expandable_segments:False", ""),
        ("page_size:1g,expandable_segments:True", "page_size:1g"),
        ("expandable_segments:True, max_split_size_mb:512 ", "max_split_size_mb:512"),
        (
            "max_split_size_mb:512,,garbage_collection_threshold:0.6",
            "max_split_size_mb:512,garbage_collection_threshold:0.6",
        ),
        ("roundup_power2_divisions:[256:1,512:2],expandable_segments:True", "roundup_power2_divisions:[256:1,512:2]"),
        ("not_expandable_segments:True", "not_expandable_segments:True"),
        ("expandable_segments_x:1", "expandable_segments_x:1"),
    ],
)
def test_only_expandable_segments_is_taken_out(before, after):
    assert without_expandable_segments(before) == after


_ENTRY = st.from_regex(r"[a-z_0-9]{1,12}:[A-Za-z0-9._\[\]:]{0,8}", fullmatch=True).filter(
    lambda entry: not entry.startswith("expandable_segments:")
)
_BLANKS = st.sampled_from(["", " ", "  "])


@given(st.data(), st.lists(_ENTRY, max_size=6))
def test_whatever_stands_beside_it_stays_in_its_order(data, entries):
    mixed = list(entries)
    for place in data.draw(st.lists(st.integers(0, len(mixed)), max_size=3)):
        mixed.insert(place, "expandable_segments:" + data.draw(st.sampled_from(["True", "False", ""])))
    text = ",".join(data.draw(_BLANKS) + entry + data.draw(_BLANKS) for entry in mixed)
    cleaned = without_expandable_segments(text)
    assert cleaned == ",".join(entries)
    assert without_expandable_segments(cleaned) == cleaned


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "PIECEWISE"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
_OBJECTS = st.dictionaries(st.sampled_from("abc"), _JSON, max_size=3)


def _leaves(value, path=()):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _at(value, path):
    for key in path:
        value = value[key]
    return value


@given(_OBJECTS, _OBJECTS)
def test_a_merge_without_differences_holds_both(theirs, ours):
    merged = merge(theirs, ours)
    for path, value in _leaves(theirs):
        assert _at(merged, path) == value or value == {}
    if not list(differences(theirs, ours)):
        for path, value in _leaves(ours):
            assert path == () or value == {} or _at(merged, path) == value
        assert merge(merged, ours) == merged


@given(_OBJECTS)
def test_an_object_does_not_differ_from_itself(value):
    assert not list(differences(value, value))
    assert merge(value, value) == value


def test_differences_name_the_place_and_tell_kinds_apart():
    (found,) = differences({"a": {"b": 1, "c": 2}}, {"a": {"b": True}})
    assert found.path == ("a", "b")
    assert (found.theirs, found.ours) == (1, True)
    assert list(differences({"a": 1}, {"a": {"b": 1}}))
