"""Whether an engine could take an update at all, whatever its weights are."""

from rollfleet_operator.api.weightversion import SourceType
from rollfleet_operator.core.moves import Update
from rollfleet_operator.core.reasons import Reason
from rollfleet_protocol.state import EngineState, FailureReason

NEEDED = ("verify/Digest", "verify/Coverage", "verify/Logprobs")  # of every update


def unfit(update: Update, state: EngineState) -> tuple[str, str]:
    """(reason, text) of why the engine could not take the update; empty where it could."""
    facts, lacking = state.facts, _lacking(update, state)
    if lacking:
        who = f"guard {facts.guard_version} on {facts.engine} {facts.engine_version}"
        return Reason.UNSUPPORTED, f"{who} lacks {lacking}"
    highest = max(update.weight_version.spec.verify.probe.tokens)
    if 0 < facts.vocabulary <= highest:
        text = f"spec.verify.probe.tokens names token {highest}, its model has {facts.vocabulary}, from 0 on"
        return FailureReason.PROBE_FAILED.value, text
    return "", ""


def _lacking(update: Update, state: EngineState) -> str:
    """Capabilities that the update needs and the engine does not name."""
    needed = (*_of_source(update), *NEEDED, f"pause/{update.weight_version.spec.pause.mode.value}")
    lacking = [need for need in needed if need not in state.facts.capabilities]
    parallelism = update.world.fleet.spec.parallelism
    ranks, workers = state.facts.data_parallel_size, state.facts.world_size
    if ranks != parallelism.data:
        lacking.append(f"{parallelism.data} data-parallel ranks (spec.parallelism.data): it reports {ranks}")
    elif workers != parallelism.workers:
        lacking.append(
            f"{parallelism.workers} workers (spec.parallelism: tensor x pipeline x data): it reports {workers}"
        )
    return ", ".join(lacking)


def _of_source(update: Update) -> tuple[str, ...]:
    if update.weight_version.spec.source.type is SourceType.CHECKPOINT:
        return ("source/Checkpoint",)
    return ("source/Trainer", f"backend/{update.backend}")
