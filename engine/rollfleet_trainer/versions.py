"""Which number a version gets, and what is written of it. Pure: over objects as the API server has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

from rollfleet_trainer.errors import NotPossible

Manifest = dict[str, Any]
API_VERSION = "rollfleet.io/v1alpha1"
TRAINER: Manifest = {"type": "Trainer", "trainer": {}, "checkpoint": None}
ENDED = ("Active", "Failed")
HELD = ("Verifying", "Opening", "Active")  # phases in which the digest is that of what all engines hold
MOST_UNLIKELY = 1e9  # below that a float has no digits for what is compared


@dataclass(frozen=True)
class Wish:
    """What is asked for. Fields of None stay as the WeightVersion has them, but for probe, label and copy."""

    version: int | None = None  # None: the next one
    step: str = ""
    pause: str | None = None  # abort, wait, keep
    drain_timeout_s: int | None = None
    probe: Sequence[int] | None = None  # token ids
    probe_logprobs: Sequence[float] | None = None  # natural, of the tokens after the first, under these very weights
    recovery: str | None = None  # path of a stored copy below volumes.checkpoints
    spec: Mapping[str, Any] = field(default_factory=dict)  # further fields of spec, as the API has them

    def __post_init__(self) -> None:
        if self.version is not None:
            object.__setattr__(self, "version", _whole("version", self.version, "a whole number, or left out"))
        fixed = {"version", "source", "engineRef", "step", "recovery"} & set(self.spec)
        if fixed:
            raise NotPossible(f"spec must not set {', '.join(sorted(fixed))}: the arguments of update do")
        if self.probe_logprobs is not None and len(self.probe_logprobs) != len(self.probe or ()) - 1:
            tokens, values = len(self.probe or ()), len(self.probe_logprobs)
            raise NotPossible(
                f"probe has {tokens} tokens, probe_logprobs {values} values: one for each after the first"
            )


def label(step: object) -> str:
    """spec.step of what a trainer calls its step: a text, or a whole number of any library's."""
    return str(step) if isinstance(step, str) else str(_whole("step", step, "a text or a whole number"))


def _whole(what: str, value: object, wanted: str) -> int:
    try:
        if not isinstance(value, bool):
            return index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise NotPossible(f"{what} is {value!r:.80}: must be {wanted}")


@dataclass(frozen=True)
class Plan:
    """What is to be written so that the fleet is asked for a version; `body` None: it is asked for already."""

    version: int
    name: str
    creates: bool
    body: Manifest | None


def in_charge(weight_versions: Sequence[Manifest], engine: Manifest) -> Manifest | None:
    """The one that brought the committed version, else the oldest that stays: as the operator chooses."""
    name = engine["metadata"]["name"]
    present = [
        each
        for each in weight_versions
        if each["spec"]["engineRef"]["name"] == name and not each["metadata"].get("deletionTimestamp")
    ]
    uid = _committed(engine).get("weightVersionUID")
    oldest = min(
        present, key=lambda each: (each["metadata"]["creationTimestamp"], each["metadata"]["uid"]), default=None
    )
    return next((each for each in present if each["metadata"]["uid"] == uid), oldest)


def own_name(fleet: str) -> str:
    """Of the WeightVersion that is made for a fleet without one."""
    return f"{fleet}-policy"


def plan(engine: Manifest, charge: Manifest | None, wish: Wish) -> Plan:
    """What to write. NotPossible where the operator would not take it."""
    place = f"{engine['metadata']['namespace']}/{engine['metadata']['name']}"
    if engine["metadata"].get("deletionTimestamp"):
        raise NotPossible(f"{place}: the fleet is being deleted")
    if charge is not None and wish.version == charge["spec"]["version"] and is_under_way(charge):
        _require_same(place, charge, wish)
        return Plan(int(charge["spec"]["version"]), charge["metadata"]["name"], creates=False, body=None)
    highest = highest_version(engine, charge)
    version = highest + 1 if wish.version is None else wish.version
    if version <= highest:
        raise NotPossible(f"{place}: version {version} must exceed {highest}, which was asked for or is committed")
    spec = _carried(charge) | _spec(version, wish)
    if charge is not None:
        metadata = {name: charge["metadata"][name] for name in ("resourceVersion", "uid")}
        return Plan(version, charge["metadata"]["name"], creates=False, body={"metadata": metadata, "spec": spec})
    name = own_name(engine["metadata"]["name"])
    body = {
        "apiVersion": API_VERSION,
        "kind": "WeightVersion",
        "metadata": {"name": name, "namespace": engine["metadata"]["namespace"]},
        "spec": _without_none(spec | {"engineRef": {"name": engine["metadata"]["name"]}}),
    }
    return Plan(version, name, creates=True, body=body)


def is_written(planned: Plan, charge: Manifest) -> bool:
    """Whether this is what was planned, where the answer to writing it got lost: all of it, not only its number."""
    return planned.body is None or not list(_differing(_without_none(planned.body["spec"]), charge["spec"]))


def _require_same(place: str, charge: Manifest, wish: Wish) -> None:
    """Who sends a version that is asked for already changes nothing of it: its label, its checks are what was asked."""
    version = int(charge["spec"]["version"])
    wished = _without_none(_spec(version, wish))
    del wished["source"]
    if not wish.step:
        del wished["step"]
    others = sorted(_differing(wished, charge["spec"]))
    if others:
        raise NotPossible(
            f"{place}: version {version} is asked for already, with another {', '.join(others)}: leave that out to "
            "send what was asked for, or take a higher version"
        )


def _differing(wished: Manifest, have: Manifest) -> Iterator[str]:
    """Fields, by their paths."""
    for name, value in wished.items():
        there = have.get(name)
        if isinstance(value, dict):
            yield from (f"{name}.{below}" for below in _differing(value, there if isinstance(there, dict) else {}))
        elif there != value:
            yield name


def highest_version(engine: Manifest, charge: Manifest | None) -> int:
    """The highest number that was ever used, as far as the objects tell."""
    asked = 0 if charge is None else int(charge["spec"]["version"])
    return max(asked, int(_committed(engine).get("version") or 0))


def trainers_of(engine: Manifest) -> tuple[str, ...]:
    """ServiceAccounts that may send to the fleet. NotPossible where there is none."""
    trainers = tuple(str(each["serviceAccountName"]) for each in engine["spec"].get("trainers") or ())
    if not trainers:
        require_pushes(engine)
    return trainers


def require_pushes(engine: Manifest) -> None:
    """NotPossible where the fleet's spec lacks what every push needs, with all that it lacks."""
    spec, place = engine["spec"], f"{engine['metadata']['namespace']}/{engine['metadata']['name']}"
    there = {
        "trainers": spec.get("trainers"),
        "weightTransfer.backend": (spec.get("weightTransfer") or {}).get("backend"),
    }
    lacking = " and ".join(f"spec.{name}" for name, value in there.items() if not value)
    if lacking:
        raise NotPossible(
            f"{place} takes no pushes: its RolloutEngine has no {lacking}; docs/trainer.md says what is needed"
        )


def require_account(charge: Manifest | None, account: str) -> None:
    """NotPossible where spec.source.trainer keeps pushes for another ServiceAccount: a bump leaves that as it is."""
    trainer = {} if charge is None else charge["spec"]["source"].get("trainer") or {}
    wanted = trainer.get("serviceAccountName")
    if charge is not None and wanted not in (None, account):
        place = f"{charge['metadata']['namespace']}/{charge['metadata']['name']}"
        raise NotPossible(
            f"{place}: spec.source.trainer.serviceAccountName is {wanted!r}, this trainer sends as {account!r}: send "
            "as that one (service_account), or take the field out of the WeightVersion"
        )


def is_under_way(charge: Manifest) -> bool:
    """Whether its version is a trainer's that has not ended: whoever offers it may send it."""
    if charge["spec"]["source"]["type"] != "Trainer":
        return False
    status = charge.get("status") or {}
    ended = status.get("version") == charge["spec"]["version"] and status.get("phase") in ENDED
    return not ended or status.get("observedGeneration", 0) < charge["metadata"]["generation"]


def _spec(version: int, wish: Wish) -> Manifest:
    """The fields that are written: a merge patch. A copy of the version before is none of this one."""
    recovery = None if wish.recovery is None else {"checkpoint": {"path": wish.recovery}}
    spec: Manifest = {"version": version, "step": wish.step, "source": TRAINER, "recovery": recovery}
    pause: Manifest = {}
    if wish.pause is not None:
        pause["mode"] = wish.pause
    if wish.drain_timeout_s is not None:
        pause["drainTimeoutSeconds"] = wish.drain_timeout_s
    if pause:
        spec["pause"] = pause
    expected = None if wish.probe_logprobs is None else [logprob(value) for value in wish.probe_logprobs]
    tokens = None if wish.probe is None else [int(token) for token in wish.probe]
    # What the version before was asked goes: it may be no token of the next run's model.
    probe: Manifest = {"tokens": tokens, "maxAbsLogprobDiff": None, "expectedLogprobs": expected}
    spec["verify"] = {"probe": probe}
    merged: Manifest = _merged(spec, dict(wish.spec))
    return merged


def holds(weight_version: Manifest) -> bool:
    """Whether its version is a trainer's, and by the operator's word all engines hold it."""
    spec, status = weight_version["spec"], weight_version.get("status") or {}
    held = spec["source"]["type"] == "Trainer" and status.get("phase") in HELD
    return held and status.get("version") == spec["version"]


def stored(version: int, path: str) -> Manifest:
    """spec.stored: it keeps the copy's name for an operator that looks only when the spec has gone on."""
    return {"version": version, "checkpoint": {"path": path}}


def _carried(charge: Manifest | None) -> Manifest:
    """The copy of the version before, which somebody may have named a moment ago.

    What stored said until now has been recorded: the operator has seen the spec that holds it.
    """
    path = None if charge is None else ((charge["spec"].get("recovery") or {}).get("checkpoint") or {}).get("path")
    if charge is None or path is None or not holds(charge):
        return {}
    return {"stored": stored(int(charge["spec"]["version"]), path)}


def logprob(value: float) -> str:
    """As spec.verify.probe.expectedLogprobs takes it: a decimal of at most 32 characters."""
    found = float(value)
    if not -MOST_UNLIKELY < found <= 0:
        raise NotPossible(f"probe_logprobs: {found} is no natural log-probability")
    return f"{found:.12f}"


def _merged(one: Any, other: Any) -> Any:
    if not (isinstance(one, dict) and isinstance(other, Mapping)):
        return other
    return {**one, **{name: _merged(one.get(name), value) for name, value in other.items()}}


def _without_none(value: Any) -> Any:
    """What a merge patch would remove has no place in a new object."""
    if not isinstance(value, dict):
        return value
    return {name: _without_none(each) for name, each in value.items() if each is not None}


def _committed(engine: Manifest) -> Manifest:
    found: Manifest = (engine.get("status") or {}).get("committed") or {}
    return found
