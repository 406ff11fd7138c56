"""Which weights are held, and how that is told: pure, part of the machine."""

from rollfleet_engine.guard.states import INITIAL_SOURCE
from rollfleet_protocol.commands import CheckpointRoot, CheckpointSource, Push
from rollfleet_protocol.state import Weights


def source_text(source: CheckpointSource) -> str:
    """A checkpoint as Weights.source tells it."""
    return INITIAL_SOURCE if source.root is CheckpointRoot.MODEL else f"checkpoint:{source.path}"


def push_source(push: Push) -> str:
    """A trainer as Weights.source tells it."""
    return f"trainer:{push.sender.subject}"


def holds(weights: Weights, version: int, digest: str | None) -> bool:
    """Whether these are the weights meant. Without a digest only model.path itself, as version 0, can be meant."""
    if weights.version != version:
        return False
    return weights.digest == digest or (digest is None and version == 0 and weights.source == INITIAL_SOURCE)


def tell(weights: Weights) -> str:
    """For messages."""
    return f"{weights.state} version {weights.version} with digest {weights.digest}"
