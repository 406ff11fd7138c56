"""How the guard obeys or refuses Sleep and Wake: pure, part of the machine."""

from rollfleet_engine.guard.states import GuardState
from rollfleet_protocol.commands import Sleep, Wake
from rollfleet_protocol.sleep import Tag
from rollfleet_protocol.state import Gate, WeightsState

LOADED = (WeightsState.INITIAL, WeightsState.LOADED, WeightsState.VERIFIED)


def fell_asleep(state: GuardState, command: Sleep) -> bool:
    """Whether it sleeps like that already."""
    return state.sleep.level == command.level and not state.sleep.awake


def is_awake(state: GuardState, command: Wake) -> bool:
    """Whether nothing of what is to wake sleeps."""
    return not set(command.tags) & set(state.asleep)


def sleep_obstacle(state: GuardState, command: Sleep, in_flight: int) -> str:
    """Why it cannot fall asleep now, and what comes first; empty if it can."""
    if state.gate is Gate.OPEN:
        return "the gate is open: Close comes before Sleep"
    if state.asleep:
        asleep = ", ".join(state.asleep)
        return f"{asleep} asleep at level {state.sleep.level}: Wake comes before another Sleep"
    if state.quiesced_epoch != command.epoch or not state.paused or in_flight > 0:
        return f"not quiesced under epoch {command.epoch} ({in_flight} requests in flight): Close comes before Sleep"
    if not state.alive or state.draining:
        return f"the engine is {state.closed_reason}: it ends"
    if state.weights.state not in (*LOADED, WeightsState.ABSENT):
        return f"the weights are {state.weights.state}: a complete update or reload comes before Sleep"
    return ""


def wake_obstacle(state: GuardState, command: Wake) -> str:
    """Why this cannot wake up now, and what comes first; empty if it can."""
    if Tag.KV_CACHE not in command.tags or Tag.KV_CACHE not in state.asleep:
        return ""
    if Tag.WEIGHTS in state.asleep and Tag.WEIGHTS not in command.tags:
        return "the weights sleep: Wake with tag weights comes before tag kv_cache"
    if state.weights.state not in LOADED:
        what = f"the weights are {state.weights.state}"
        return f"{what}: Wake with tag weights, then Transfer, come before Wake with tag kv_cache"
    return ""
