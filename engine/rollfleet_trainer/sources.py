"""What a trainer has, tensor by tensor: whole, named as the model's checkpoint names them, in parts of bounded size.

Shards are gathered one by one, when their turn comes. That is a collective: every rank of a sharded trainer must go
through the same tensors in the same order, also when a push fails half-way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch

from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.given import EMPTY, pair_of, require_described, require_form, require_kind
from rollfleet_trainer.taken import Forms
from rollfleet_trainer.tensors import Sent, nbytes, raw_bytes

PART_BYTES = 1 << 30  # of gathered tensors that are held at once, or one that is larger
PART_TENSORS = 50_000  # of one call; a name of usual length each is far below a guard's largest body

Pair: TypeAlias = tuple[str, torch.Tensor]
Weighed: TypeAlias = tuple[str, torch.Tensor, bool]  # and whether its memory is the trainer's own anyway


@dataclass(frozen=True)
class ParamMeta:
    """As vLLM's (distributed/weight_transfer/base.py): name, dtype and full shape of a tensor that comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """vLLM's WeightSource, by structure: each pass of __iter__ yields whole tensors, one at a time."""

    def metadata(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Pair]: ...


Given: TypeAlias = (
    torch.nn.Module | Mapping[str, torch.Tensor] | WeightSource | Iterable[Pair] | Callable[[], Iterable[Pair]]
)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it must be gathered (DTensor, as FSDP2 and tensor parallelism have it): vLLM asks the same way."""
    return callable(getattr(tensor, "full_tensor", None))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, without its history; a collective where it is sharded."""
    with torch.no_grad():
        return (tensor.full_tensor() if is_sharded(tensor) else tensor).detach()


def without_tied(given: Mapping[str, torch.Tensor]) -> Iterator[Pair]:
    """A dict's tensors, names of one memory under the first only: as named_parameters() and publish have tied weights.

    A state_dict() has them under each of their names. Shards are not compared: ranks must go through the same ones, and
    a rank may hold nothing of a tensor. Nor are mappings of other kinds, which may make tensors in memory used again.
    """
    seen: set[tuple[object, ...]] = set()
    for name, tensor in map(pair_of, given.items()):
        if isinstance(given, dict) and not is_sharded(tensor) and tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if place in seen:
                continue
            seen.add(place)
        yield name, tensor


def described(given: Given, *, alone: bool = True) -> list[Any] | None:
    """Name, dtype and full shape of every tensor, without gathering one; None where only a pass would tell.

    alone: no other rank gathers with us. Else a WeightSource is not asked: to tell its metadata it may have to gather.
    """
    if isinstance(given, torch.nn.Module):
        pairs: Iterable[Pair] = given.named_parameters()
    elif isinstance(given, Mapping):
        pairs = without_tied(given)
    elif isinstance(given, list | tuple):
        pairs = given
    elif alone and callable(metadata := getattr(given, "metadata", None)):
        return list(metadata())
    else:
        return None
    return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in map(pair_of, pairs)]


def forms_of(found: Iterable[Any]) -> Forms:
    """Of what described() gives."""
    return {each.name: (str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in found}


class Weights:
    """What `update` was given. A pass yields each tensor whole, and whether its memory is the trainer's own anyway.

    A module, a mapping, a WeightSource and a callable can be gone through again. Of an iterator that is possible while
    all that it yielded were parameters or shards, which are kept by reference: `policy.named_parameters()` is one.
    """

    def __init__(self, given: Given) -> None:
        self._given = given
        self._consumed = False
        self._kept: list[Pair] | None = []
        self._begun: Iterator[Pair] | None = None  # a pass whose first tensor was looked at, and is still to come

    def require_sendable(self, *, alone: bool) -> Forms | None:
        """Dtype and full shape by name; None where only a pass would tell.

        NotPossible for what cannot be sent, as far as that can be known without making all of it.

        alone: no other rank gathers with us, so that the first pass may be begun: where only that tells what comes its
        first tensor is made now, and held until it goes out. But of an iterator, which whoever calls again after a
        refusal may give again.
        """
        given = self._given
        require_kind(given)
        lazy = isinstance(given, Mapping) and not isinstance(given, dict)  # it may make its tensors
        if not lazy and (found := described(given, alone=alone)) is not None:
            require_described(found)
            return forms_of(found)
        if isinstance(given, Mapping) and not given:
            raise NotPossible(EMPTY)
        if alone and not (isinstance(given, Iterator) or hasattr(given, "require_another_pass")):
            self._begin()
        return None

    def _begin(self) -> None:
        pairs = iter(self._pairs())
        first = next(pairs, None)
        if first is None:
            raise NotPossible(EMPTY)
        name, tensor = pair_of(first)
        require_form(name, tensor.dtype, tensor.shape)
        self._begun = chain((first,), pairs)

    def nbytes(self, *, alone: bool) -> int:
        """Of all of them, or 0 where only a pass would tell. `alone` as for require_sendable."""
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in described(self._given, alone=alone) or ())

    def require_another_pass(self) -> None:
        """NotPossible where there can be none."""
        if self._consumed:
            self._replayed()
        judge = getattr(self._given, "require_another_pass", None)  # what is handed over by others knows by itself
        if callable(judge):
            judge()

    def go_through(self) -> Iterator[Weighed]:
        """One pass. NotPossible where there can be no other one."""
        pairs, self._begun = self._begun or self._pairs(), None
        for name, tensor in map(pair_of, pairs):
            sharded = is_sharded(tensor)
            owned = not sharded and (isinstance(tensor, torch.nn.Parameter) or isinstance(self._given, Mapping))
            yield name, whole(tensor), owned

    def _pairs(self) -> Iterable[Pair]:
        given = self._given
        require_kind(given)
        if isinstance(given, torch.nn.Module):
            parameters: Iterable[Pair] = given.named_parameters()
            return parameters
        if isinstance(given, Mapping):
            return without_tied(given)
        if not isinstance(given, Iterator):
            return self._called(given) if callable(given) else given
        return self._replayed() if self._consumed else self._recorded(given)

    def _called(self, given: Callable[[], Iterable[Pair]]) -> Iterable[Pair]:
        made = given()
        if not isinstance(made, Iterable):
            raise NotPossible(f"the callable that update was given returned a {type(made).__name__}, no pairs")
        return made

    def _recorded(self, given: Iterator[Pair]) -> Iterator[Pair]:
        """While they are gone through for the first time."""
        self._consumed = True
        for name, tensor in given:
            if self._kept is not None and (is_sharded(tensor) or isinstance(tensor, torch.nn.Parameter)):
                self._kept.append((name, tensor))
            else:
                self._kept = None  # made for this pass: keeping it would hold the whole model
            yield name, tensor

    def _replayed(self) -> Iterable[Pair]:
        if self._kept is None:
            raise NotPossible(
                "the tensors came from an iterator that cannot be gone through again: give `update` a callable that "
                "makes one (lambda: gathered(policy)), so that what failed can be sent again"
            )
        return list(self._kept)


class Part(dict[str, torch.Tensor]):
    """Tensors of one call. `tick` is told of each as a sender takes it, and may raise to end the push."""

    def __init__(self, tick: Callable[[int], None]) -> None:
        super().__init__()
        self._tick = tick

    def items(self) -> Any:
        """Name and tensor, one by one."""
        for name, tensor in super().items():
            self._tick(nbytes(tensor))
            yield name, tensor


def parts(
    tensors: Iterable[Weighed], tick: Callable[[int], None], part_bytes: int = PART_BYTES
) -> Iterator[tuple[Part, bool]]:
    """Parts in order, each with whether it is the last one. What is the trainer's own anyway takes no room."""
    part, held = Part(tick), 0
    for name, tensor, owned in tensors:
        size = 0 if owned else nbytes(tensor)
        if part and (held + size > part_bytes or len(part) >= PART_TENSORS):
            yield part, False
            part, held = Part(tick), 0
        part[name] = tensor
        held += size
    yield part, True


class DigestedSource:
    """A WeightSource around a model, or around another one: `done` is told the digest of each whole pass.

    `coming` is told what a pass brings, when somebody asks for that.
    """

    def __init__(
        self, given: Given, done: Callable[[str], None], tick: Callable[[int], None], coming: Callable[[Forms], None]
    ) -> None:
        self._given = given
        self._weights = Weights(given)
        self._done = done
        self._tick = tick
        self._coming = coming

    def metadata(self) -> list[Any]:
        """Name, dtype and full shape of every tensor, without gathering one. NotPossible for what tells none."""
        found = described(self._given)
        if found is None:
            raise NotPossible(
                f"source: of a {type(self._given).__name__} nobody knows beforehand which tensors come: give a module, "
                "a mapping, or a WeightSource with metadata()"
            )
        self._coming(forms_of(found))
        return found

    def __iter__(self) -> Iterator[Pair]:
        sent = Sent()
        for name, tensor, _ in self._weights.go_through():
            self._tick(nbytes(tensor))
            sent.add(name, tensor, raw_bytes(tensor))
            yield name, tensor
        self._done(sent.digest())
