"""Options in parts, by alias and in short: all that a command line gives, by the long name."""

import pytest

from rollfleet_engine.launch.dialects import DIALECTS, dialect_of
from rollfleet_engine.launch.options import ALIASES, SHORTHANDS, given_options, positional_words

NEWEST = dialect_of("0.32.0")
assert NEWEST is not None
KNOWN = NEWEST.option_names()


def _members(arguments: list[str], option: str, key: str) -> list[str]:
    return [value for each in given_options(arguments, KNOWN).get(option, ()) for value in each.members(key)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speculative-config", '{"method": "suffix", "num_speculative_tokens": 3}'],
        ['--speculative-config={"num_speculative_tokens": 3, "method": "suffix"}'],
        ["--speculative-config.method", "suffix", "--speculative-config.num_speculative_tokens", "3"],
        ["--speculative-config.num_speculative_tokens=3", "--speculative_config.method=suffix"],
        ["-sc", '{"method": "suffix", "num_speculative_tokens": 3}'],
        ['-sc={"method": "suffix", "num_speculative_tokens": 3}'],
        ["-sc.method", "suffix", "--speculative-config.num-speculative-tokens", "3"],
        ["--spec-method", "suffix", "--spec-tokens", "3"],
        ["--spec_method=suffix", "-sc.num_speculative_tokens=3"],
        ["--specul.method", "suffix", "--spec-t", "3"],
    ],
)
def test_every_way_to_give_speculation(arguments: list[str]):
    assert _members(arguments, "--speculative-config", "method") == ["suffix"]
    assert _members(arguments, "--speculative-config", "num_speculative_tokens") == ["3"]


def test_json_within_json():
    whole = ["--kv-transfer-config", '{"kv_connector_extra_config": {"a": {"b": true}}}']
    parts = ["--kv-transfer-config.kv_connector_extra_config.a", '{"b": true}']
    deep = ["--kv-transfer-config.kv_connector_extra_config.a.b", "true"]
    for arguments in (whole, parts, deep):
        assert _members(arguments, "--kv-transfer-config", "kv_connector_extra_config.a.b") == ["true"]
        assert _members(arguments, "--kv-transfer-config", "kv_connector_extra_config.b") == []
    assert _members(["--kv-transfer-config", "{"], "--kv-transfer-config", "a") == []
    assert _members(["--kv-transfer-config"], "--kv-transfer-config", "a") == []


def test_every_occurrence_is_kept_with_its_value():
    found = given_options(["--block-size", "64", "--block_size=128", "-O3", "--seed", "-1"], KNOWN)
    assert [each.value for each in found["--block-size"]] == ["64", "128"]
    assert [each.value for each in found["--optimization-level"]] == ["3"]
    assert [each.value for each in found["--seed"]] == ["-1"]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.releases)
def test_short_options_of_a_release_have_their_long_ones(dialect):
    known = dialect.option_names()
    assert {name for name in known if not name.startswith("--")} <= ALIASES.keys()
    assert {option for name, option in ALIASES.items() if name in known} <= known
    assert SHORTHANDS.keys() | {option for option, _ in SHORTHANDS.values()} <= known


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "router"], ["serve", "router"]),
        (["--seed", "1", "serve", "router"], ["serve", "router"]),
        (["--enforce-eager", "router"], ["router"]),
        (["--no-enforce-eager", "router"], ["router"]),
        (["--disable-log-stats", "router"], ["router"]),
        (["-O3", "router"], ["router"]),
        (["--seed=1", "router"], ["router"]),
        (["--seed", "1", "--", "serve"], ["serve"]),
        (["--chat-template", "router"], []),
        (["--chat-template", "serve", "--seed", "1"], []),
        (["-sc.model", "router"], []),
        (["--optimization-level", "2"], []),
        (["-O", "2"], []),
        ([], []),
    ],
)
def test_words_that_are_no_option_s_value(arguments: list[str], words: list[str]):
    assert list(positional_words(arguments, KNOWN)) == words
