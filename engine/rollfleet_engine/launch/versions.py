"""Which releases of vLLM, vllm-ascend, torch, torch_npu, Triton-Ascend and CANN go together. Pure.

Of these vLLM only 0.23.0 is started by us (dialects.py); the table is for saying what an installation mixes.
Sources: vllm-ascend's release compatibility matrix (docs/source/community/versioning_policy.md of main, 2026-08-22)
and, per release, its requirements.txt and Dockerfile (tags v0.23.0rc1, v0.23.0, v0.24.0rc1, v0.25.1rc1). Of releases
that are not in the table what their policy promises is checked: a release has vLLM's own number, torch_npu has torch's.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollfleet_engine.launch.dialects import supported_releases
from rollfleet_engine.launch.facts import AscendSoftware, Installation
from rollfleet_protocol.termination import Problem

Number = tuple[int, ...]


@dataclass(frozen=True)
class Pairing:
    """What a release of vllm-ascend was built and tested with."""

    vllm_ascend: str
    vllm: str
    torch: str
    torch_npu: str
    triton_ascend: str
    cann: str


PAIRINGS = (
    Pairing("0.23.0rc1", "0.23.0", "2.10.0", "2.10.0.post2", "3.2.1", "9.0.1"),
    Pairing("0.23.0", "0.23.0", "2.10.0", "2.10.0.post4", "3.2.2", "9.1.0"),
    Pairing("0.24.0rc1", "0.24.0", "2.10.0", "2.10.0.post2", "3.2.1", "9.0.1"),
    Pairing("0.25.1rc1", "0.25.1", "2.10.0", "2.10.0.post2", "3.2.1", "9.0.1"),
)

_NUMBER = re.compile(r"v?([0-9]{1,9}(?:\.[0-9]{1,9}){1,3})")


def number_of(version: str) -> Number | None:
    """The numbers of a version, without pre-release, post-release or local part: (2, 10, 0) of 2.10.0.post4+cpu."""
    match = _NUMBER.match(version.strip())
    if match is None:
        return None
    numbers = tuple(int(part) for part in match[1].split("."))
    return numbers + (0,) * (3 - len(numbers))


def post_of(version: str) -> int:
    """The number of a post-release: 4 of 2.10.0.post4, else 0."""
    match = re.search(r"\.?post([0-9]{1,9})", version)
    return int(match[1]) if match else 0


def is_development(version: str) -> bool:
    """Whether it was built between releases, so that its number says nothing of what it goes with."""
    return "dev" in version


def pairing_of(vllm_ascend: str) -> Pairing | None:
    """The table's row. A post-release of a release mends errors only, and goes with the same (their policy)."""
    public = re.sub(r"^v|\+.*$|\.?post[0-9]+", "", vllm_ascend.strip())
    return next((row for row in PAIRINGS if row.vllm_ascend == public), None)


def version_problems(installation: Installation, ascend: AscendSoftware | None) -> Iterator[Problem]:
    """What of an Ascend installation cannot work together. None of it is cured by a restart."""
    have = installation.versions
    plugin = have.get("vllm-ascend", "")
    yield from _vllm(installation.release, plugin)
    yield from _torch(have)
    row = pairing_of(plugin)
    if row is not None:
        yield from _older("CANN", ascend.cann if ascend else "", row.cann, row)
        yield from _older("torch-npu", have.get("torch-npu", ""), row.torch_npu, row)
        yield from _older("triton-ascend", have.get("triton-ascend", ""), row.triton_ascend, row)


def version_warnings(installation: Installation, ascend: AscendSoftware | None) -> Iterator[str]:
    """What may work and was not tried together by those who make it."""
    have = installation.versions
    plugin = have.get("vllm-ascend", "")
    row = pairing_of(plugin)
    if plugin and row is None:
        what = "a build between releases" if is_development(plugin) else "not in our table"
        yield f"vllm-ascend {plugin} is {what}: which torch-npu and CANN it needs was not checked"
    if row is None:
        return
    wanted = {"CANN": (ascend.cann if ascend else "", row.cann), "torch": (have.get("torch", ""), row.torch),
              "torch-npu": (have.get("torch-npu", ""), row.torch_npu),
              "triton-ascend": (have.get("triton-ascend", ""), row.triton_ascend)}  # fmt: skip
    for name, (found, pinned) in wanted.items():
        if not found:
            yield f"{name}: no version found; vllm-ascend {plugin} was made with {pinned}"
        elif _order(found) != _order(pinned):
            yield f"{name} is {found}; vllm-ascend {plugin} was made with {pinned}"


def _vllm(vllm: str, plugin: str) -> Iterator[Problem]:
    row = pairing_of(plugin)
    if row is not None:
        wanted = number_of(row.vllm)
    elif is_development(plugin):
        return
    else:
        wanted = number_of(plugin)
    found = number_of(vllm)
    if wanted is None or found is None or wanted == found:
        return
    fits = ".".join(str(part) for part in wanted)
    yield Problem(
        cause=f"vllm-ascend {plugin} goes with vLLM {fits}, and vLLM {vllm} is installed",
        remedy=f"use an image that has both of one release, with vLLM {supported_releases()}",
    )


def _torch(have: Mapping[str, str]) -> Iterator[Problem]:
    """torch_npu is compiled against one torch: it has that one's number (Ascend/pytorch, README)."""
    torch, npu = number_of(have.get("torch", "")), number_of(have.get("torch-npu", ""))
    if torch is not None and npu is not None and torch != npu:
        fits = ".".join(str(part) for part in npu)
        yield Problem(
            cause=f"torch-npu {have['torch-npu']} needs torch {fits}, and torch {have['torch']} is installed",
            remedy=f"install torch {fits} in the engine's image",
        )


def _older(name: str, found: str, pinned: str, row: Pairing) -> Iterator[Problem]:
    have, want = _order(found), _order(pinned)
    if have is not None and want is not None and have < want:
        yield Problem(
            cause=f"{name} {found} is older than {pinned}, with which vllm-ascend {row.vllm_ascend} was made",
            remedy=f"install {name} {pinned} in the engine's image, or use the image that vllm-ascend publishes",
        )


def _order(version: str) -> tuple[Number, int] | None:
    """For comparing: numbers, then the post-release."""
    numbers = number_of(version)
    return None if numbers is None else (numbers, post_of(version))
