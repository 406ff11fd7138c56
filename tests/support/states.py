"""States of guards."""

from typing import Any

from rollfleet_protocol.state import EngineState, Facts, Gate, Weights, WeightsState


def make_state(sequence: int = 1, incarnation: str = "i-1", **changes: Any) -> EngineState:
    """An open engine that serves version 0."""
    fields: dict[str, Any] = {
        "sequence": sequence,
        "incarnation": incarnation,
        "facts": Facts(guard_version="0.1.0", engine="simulator", engine_version="1", model="policy"),
        "alive": True,
        "gate": Gate.OPEN,
        "weights": Weights(state=WeightsState.VERIFIED, version=0),
        "epoch": 1,
    }
    return EngineState(**(fields | changes))
