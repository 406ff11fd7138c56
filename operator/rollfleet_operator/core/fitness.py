"""Whether an engine could take an update at all, whatever its weights are."""

from rollfleet_operator.api.weightversion import SourceType
from rollfleet_operator.core.moves import Ending, Update, failed, hold_up, tell
from rollfleet_operator.core.objects.pod import template_hash
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.world import Engine
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


def never(update: Update) -> Ending | None:
    """The end of an update that no engine could take, now or later.

    What an engine names of itself at its start stays: its release, its size, its model. So nothing is waited for where
    all are unfit, and none is about to come up or to be replaced by one of another image, size or model.
    """
    world = update.world
    found = [hold_up(engine, reason, text) for engine, state in world.usable for reason, text in [unfit(update, state)]]
    if not found or not all(each.reason for each in found) or any(_comes(engine) for engine in world.engines):
        return None
    made_from = template_hash(world.fleet, world.settings)
    if any(engine.pod.template_hash != made_from for engine in world.engines):
        return None
    return failed(found[0].reason, f"{tell(found)}; nothing is waited for: that is so of every engine")


def _comes(engine: Engine) -> bool:
    """It may still come up, or its successor, with other facts."""
    return engine.usable is None and not engine.pod.stopped


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
