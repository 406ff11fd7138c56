"""The table of releases: every one is in one range, and says each thing in words that its own parser knows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_engine.launch.dialects import (
    ASCEND,
    ASCEND_BEFORE_RL_CONFIG,
    CPU,
    DIALECTS,
    RANGES,
    SIMULATOR,
    Dialect,
    dialect_of,
    range_of,
)
from rollfleet_engine.launch.reserved import RESERVED_OPTIONS, UNKNOWN_OPTIONS
from rollfleet_engine.launch.wishes import words_for
from rollfleet_engine.launch.words import Absent, Feature, Option, Words

PLATFORMS = (CPU, SIMULATOR, ASCEND, ASCEND_BEFORE_RL_CONFIG)
dialects = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.releases)


def test_ranges_leave_no_gap_and_do_not_overlap():
    assert all(each.first < each.end for each in RANGES)
    assert [each.end for each in RANGES[:-1]] == [each.first for each in RANGES[1:]]
    assert RANGES[0].first == (0, 23, 0)


@given(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 9)))
def test_every_release_from_the_first_on_is_in_one_range_or_is_newer_than_all(release):
    holding = [each for each in RANGES if each.first <= release < each.end]
    assert len(holding) == (RANGES[0].first <= release < RANGES[-1].end)
    text = ".".join(map(str, release))
    assert range_of(text) is (holding[0] if holding else None)
    for suffix in ("+cpu", ".post1", ".post2+cpu"):
        assert range_of(text + suffix) is range_of(text)
    assert range_of(f"{text}rc1") is None


@pytest.mark.parametrize(
    ("release", "spoken"),
    [
        ("0.23.0", True),
        ("0.23.1.dev3+gabcdef0", False),
        ("0.27.1", True),
        ("0.29.0", True),
        ("0.29.1.dev15+gabcdef0", True),  # between two releases
        ("0.27.2.dev15+gabcdef0", False),
        ("0.32.0", True),
        ("0.25.1", False),
        ("0.31.0", False),
        ("0.33.0", False),
        ("0.32.0rc1", False),
        ("main", False),
        ("", False),
    ],
)
def test_releases_that_a_plan_is_made_for(release, spoken):
    assert (dialect_of(release) is not None) is spoken


@dialects
def test_what_was_verified_is_in_its_range(dialect: Dialect):
    assert dialect.verified
    assert all(dialect_of(release) is dialect for release in dialect.verified)
    assert dialect.options_file == f"vllm-{dialect.verified[0]}.options"


@dialects
@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
@pytest.mark.parametrize("feature", Feature)
def test_every_feature_has_words_that_the_parser_knows_or_a_reason(dialect, platform, feature):
    words = words_for(feature, dialect, platform)
    if isinstance(words, Absent):
        assert words.reason
        assert words.remedy
        return
    assert isinstance(words, Words)
    known = dialect.option_names()
    for option, _ in words.options("x"):
        assert option in known
    for option in words.forbids:
        assert option in known


@dialects
def test_exclusions_name_options_that_exist(dialect: Dialect):
    for exclusion in dialect.exclusions:
        assert exclusion.reason
        if isinstance(exclusion.other, Option):
            assert exclusion.other.name in dialect.option_names()


def test_every_reserved_option_is_one_of_some_release():
    known = frozenset().union(*(dialect.option_names() for dialect in DIALECTS))
    for rule in RESERVED_OPTIONS:
        assert any(rule.covers(name) for name in known), rule.name
    assert not UNKNOWN_OPTIONS.keys() & known


@dialects
def test_what_a_field_says_no_argument_may_say(dialect: Dialect):
    """Else an option could stand on the command line twice, and the last one would win."""
    ours = {
        option
        for feature in Feature
        if isinstance(words := dialect.words.get(feature), Words)
        for option, _ in words.options("x")
    }
    for option in ours | {"--additional-config", "--compilation-config", "--weight-transfer-config"}:
        assert any(rule.covers(option) for rule in dialect.reserved_options), option
