"""The world in a few lines, for whoever reads of a promise that was broken."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.model.world import World


def describe(world: "World") -> str:
    """The world in a few lines."""
    charge, status = world.chaos.charge, world.api.fleet.status
    lines = [f"t={world.clock.time:.2f} epoch {status.epoch} committed {status.committed}"]
    if charge is not None:
        told = charge.status
        lines.append(
            f"{charge.metadata.uid} asks {charge.spec.version}: {told.version} {told.phase} epoch {told.epoch} "
            f"attempt {told.attempt} since {told.phase_started_at} {told.progress}"
        )
    for host in world.nodes.hosts.values():
        view, process = world.api.pods.get(host.uid), host.process
        state = None if process is None else process.state
        lines.append(
            f"{host.uid} leaving={host.leaving} view={view and (view.phase, view.started, view.deleting)} "
            + (
                "no process"
                if state is None
                else f"{state.gate} armed={state.armed} paused={state.paused} epoch={state.epoch} "
                f"{state.weights} op={state.operation and (state.operation.name, state.operation.status)}"
            )
        )
    lines.append(f"last finished: {status.last_finished}")
    lines.append(str(status.engines.details))
    lines.append(f"operators: {[(each.name, each.up, each.leads) for each in world.operators]}")
    return "\n  ".join(lines)
