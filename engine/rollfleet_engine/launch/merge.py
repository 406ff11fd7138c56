"""Deep merge of JSON objects that several fields speak of. Nobody's word is overwritten: a difference is told."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import JsonValue


class Difference(NamedTuple):
    """One place that two sides want different values in."""

    path: tuple[str, ...]
    theirs: JsonValue
    ours: JsonValue


def merge(theirs: Mapping[str, JsonValue], ours: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Both, object by object; `theirs` stays where both speak of one place, so look for `differences` first."""
    merged = dict(theirs)
    for key, value in ours.items():
        present = merged.get(key)
        if key not in merged:
            merged[key] = value
        elif isinstance(present, dict) and isinstance(value, dict):
            merged[key] = merge(present, value)
    return merged


def differences(
    theirs: Mapping[str, JsonValue], ours: Mapping[str, JsonValue], path: tuple[str, ...] = ()
) -> Iterator[Difference]:
    """Places where both speak and do not say the same. true and 1 are not the same, nor 1 and 1.0."""
    for key, value in ours.items():
        if key not in theirs:
            continue
        present = theirs[key]
        if isinstance(present, dict) and isinstance(value, dict):
            yield from differences(present, value, (*path, key))
        elif type(present) is not type(value) or present != value:
            yield Difference((*path, key), present, value)
