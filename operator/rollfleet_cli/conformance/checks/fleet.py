"""What all engines that were asked must have in common."""

from decimal import Decimal

from rollfleet_cli.conformance.checks.check import Fault, FleetCheck, Held, Member, Promise
from rollfleet_operator.core.probes import Disagreement, compare
from rollfleet_protocol.state import ProbeReport, ProbeResult


def same_weights(members: tuple[Member, ...], held: Held | None, _: Decimal) -> tuple[Fault, ...]:
    """The committed version and digest, on each."""
    if held is None:
        return (Fault("nothing is committed, so there is nothing that engines must hold"),)
    found = []
    for each in members:
        weights = each.state.weights
        if weights.version != held.version:
            found.append(Fault(f"{each.pod} holds version {weights.version}, and {held.version} is committed"))
        elif held.digest and weights.digest != held.digest:
            found.append(Fault(f"{each.pod} holds digest {weights.digest or 'none'}, and {held.digest} is committed"))
    digests = {each.state.weights.digest for each in members if each.state.weights.digest}
    if not held.digest and len(digests) > 1:
        found.append(Fault(f"engines hold different digests: {', '.join(sorted(digests))}"))
    return tuple(found)


def same_answers(members: tuple[Member, ...], _: Held | None, allowed: Decimal) -> tuple[Fault, ...]:
    """To the probe, on every rank of each."""
    silent = [Fault(f"{each.pod} has no answer to the probe", each.error) for each in members if each.report is None]
    probed = [(each.pod, as_result(each.report)) for each in members if each.report is not None]
    found = compare(list(probed), allowed) if probed else ""
    return (*silent, *((Fault(found.text),) if isinstance(found, Disagreement) else ()))


def same_release(members: tuple[Member, ...], _held: Held | None, _allowed: Decimal) -> tuple[Fault, ...]:
    """Of guard, engine and what is below: a report speaks of one of each."""
    found = []
    first = members[0]
    for each in members[1:]:
        mine, theirs = each.state.facts, first.state.facts
        if (mine.guard_version, mine.engine_version, mine.host.software) != (
            theirs.guard_version,
            theirs.engine_version,
            theirs.host.software,
        ):
            found.append(
                Fault(f"{each.pod} runs on other releases than {first.pod}: see engines[].facts of the report")
            )
    return tuple(found)


def as_result(report: ProbeReport) -> ProbeResult:
    """As the operator compares them."""
    return ProbeResult(
        epoch=report.epoch,
        version=report.weights.version or 0,
        tokens=report.tokens,
        logprobs=report.by_rank[0] if report.by_rank else (),
        other_ranks=report.by_rank[1:],
        seconds=report.seconds,
    )


CHECKS = (
    FleetCheck(
        "same-weights",
        "every engine holds the committed version and digest",
        Promise.NEVER_STALE,
        "`rollfleet status NAME` tells of an update that runs; else `rollfleet diagnose NAME`",
        same_weights,
    ),
    FleetCheck(
        "same-answers",
        "all engines answer the probe alike",
        Promise.NEVER_STALE,
        "`rollfleet verify NAME` names those that differ; verify.probe.maxAbsLogprobDiff is what is allowed",
        same_answers,
    ),
    FleetCheck(
        "same-releases",
        "all engines run on the same releases",
        Promise.NOTHING_HIDDEN,
        "a tag that moved gives pods different images: pin spec.image by digest",
        same_release,
    ),
)
