"""All checks in the order in which they run, and what none of them tries."""

from rollfleet_cli.conformance.checks import answers, features, fleet, locked, states, update
from rollfleet_cli.conformance.checks.check import Check, Entry, FleetCheck

ENGINE_CHECKS: tuple[Check, ...] = (*states.CHECKS, *locked.CHECKS, *answers.CHECKS, *features.CHECKS)
FLEET_CHECKS: tuple[FleetCheck, ...] = fleet.CHECKS
UPDATE_CHECKS: tuple[update.UpdateCheck, ...] = update.CHECKS
CHECKS: dict[str, Entry] = {check.id: check for check in (*ENGINE_CHECKS, *FLEET_CHECKS, *UPDATE_CHECKS)}

# What a report says nothing about, and why.
NOT_TRIED = (
    (
        "pushes of a trainer (gloo, shm, hccl, ipc)",
        "a push needs a trainer that holds weights: the fleet's own next update shows it",
    ),
    ("sleeping and waking", "no object of this release puts an engine to sleep"),
    (
        "pause modes wait and keep",
        "they are told apart by requests in flight: the update here uses the WeightVersion's own",
    ),
    ("rollback, retries, kills", "they need failures, which a fleet that serves is spared"),
)
