"""What a release does not do together, looked for in all that a spec says. Pure."""

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from pydantic import JsonValue

from rollfleet_engine.launch.dialects import Dialect
from rollfleet_engine.launch.options import GivenOptions
from rollfleet_engine.launch.wishes import Wish
from rollfleet_engine.launch.words import Compilation, Feature, Option, Thing
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.launch_rules import COMPILATION
from rollfleet_protocol.termination import Problem

_ARGS = "spec.engine.args"


def excluded(
    config: EngineConfig, asked: Mapping[Feature, Wish], given: GivenOptions, dialect: Dialect
) -> Iterator[Problem]:
    """Each pair that is asked for, with vLLM's reason."""
    for exclusion in dialect.exclusions:
        if exclusion.feature not in asked:
            continue
        things = (exclusion.other,) if exclusion.also is None else (exclusion.other, exclusion.also)
        told = [_told(thing, config, asked, given) for thing in things]
        if all(told):
            yield Problem(
                cause=f"{asked[exclusion.feature].named} excludes {' with '.join(told)} "
                f"in vLLM {dialect.releases}: {exclusion.reason}",
                remedy="give up one of them",
            )


def _told(thing: Thing, config: EngineConfig, asked: Mapping[Feature, Wish], given: GivenOptions) -> str:
    """A thing as it is given, where it is there and of a value that matters; else empty."""
    if isinstance(thing, Feature):
        return asked[thing].named if thing in asked else ""
    if isinstance(thing, Compilation):
        value = _at(config.compilation_config, thing.key)
        return f"{COMPILATION}.{thing.key} {value}" if value in thing.values else ""
    return next(_matches(thing, given), "")


def _matches(option: Option, given: GivenOptions) -> Iterator[str]:
    """Any occurrence counts: of JSON in parts vLLM makes one object."""
    for each in given.get(option.name, ()):
        if not option.values:
            yield f"{option.name} ({_ARGS})"
            continue
        for value in each.members(option.key) if option.key else [each.value]:
            meant = value is not None and any(fnmatchcase(value, name) for name in option.values)
            if value is not None and meant is not option.but:
                yield f"{' '.join(filter(None, (option.name, option.key, value)))} ({_ARGS})"


def _at(found: JsonValue, path: str) -> str:
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else json.dumps(found)
