"""The story of a schedule, line by line, for whoever looks at a seed that broke a promise."""

from collections.abc import Callable

from rollfleet_operator.core.actions import Decision
from rollfleet_operator.runtime.apply import summary
from tests.model.nodes import Host
from tests.model.operators import Operator
from tests.model.world import World


def tell(world: World, say: Callable[[str], None] = print) -> None:
    """From here on say what happens."""

    def line(text: str) -> None:
        say(f"{world.clock.time:9.3f}  {text}")

    strike = world.chaos.strike
    world.chaos.strike = lambda blow: (line(f"!! {blow.kind} {blow.who} {blow.seconds:g}"), strike(blow))[1]  # type: ignore[method-assign]
    for operator in world.operators:
        operator.on_decision = lambda decision, operator=operator: _decided(operator, decision, line)  # type: ignore[misc]
    wrote, told = world.api.on_fleet_status, world.api.on_weight_status
    world.api.on_fleet_status = lambda before, after: (
        line(f"FLEET epoch {after.epoch} committed {after.committed and after.committed.version}"),
        wrote(before, after),
    )[1]
    world.api.on_weight_status = lambda known, after: (
        line(f"VERSION {known.metadata.uid} {after.version} {after.phase} epoch {after.epoch}"),
        told(known, after),
    )[1]
    for trainer in world.trainers:
        trainer.on_word = lambda text, trainer=trainer: line(f"    {trainer.holder}: {text}")  # type: ignore[misc]
    changed, seen = world.nodes.on_change, dict[str, str]()

    def engine(host: Host) -> None:
        text = _engine(host)
        if seen.get(host.uid) != text:
            seen[host.uid] = text
            line(f"  {host.uid}: {text}")
        changed(host)

    world.nodes.on_change = engine


def _decided(operator: Operator, decision: Decision, line: Callable[[str], None]) -> None:
    actions = [summary(action) for action in decision.actions]
    write = decision.fleet_status
    wants = [] if write is None else [f"fleet epoch {write.status.epoch}"]
    wants += [f"{each.name} {each.status.version} {each.status.phase}" for each in decision.weight_version_statuses]
    if actions or wants:
        line(f"{operator.name}: {'; '.join(actions)} | {'; '.join(wants)}")


def _engine(host: Host) -> str:
    if host.process is None:
        return "no process"
    state = host.process.state
    operation = state.operation
    doing = "" if operation is None else f"{operation.name} {operation.status}"
    marks = "".join(
        word
        for word, holds in ((" armed", state.armed), (" paused", state.paused), (" draining", state.draining))
        if holds
    )
    return f"{state.gate} {state.weights.state} {state.weights.version} epoch {state.epoch}{marks} [{doing}]"
