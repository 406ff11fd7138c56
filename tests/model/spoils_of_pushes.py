"""What is spoilt in pushes: who is waited for, who may call, and what is compared of what came."""

from typing import Any

from rollfleet_engine.guard import orders
from rollfleet_engine.guard.native import NativeRoutes
from rollfleet_operator.core import changing, ending, plan, plan_weights, quiescing, sender, world
from tests.model.pushes import ModelSession
from tests.model.spoils import Patch, around


def what_is_offered_is_not_read(patch: Patch) -> None:
    """To hold the Lease is enough."""
    patch.setattr(sender, "wanted", lambda update: update.world.sender.offers)


def a_lease_lasts_for_ever(patch: Patch) -> None:
    """Whoever held it last is believed to live."""
    patch.setattr(sender, "_alive", lambda _: True)


def a_lost_sender_is_waited_for(patch: Patch) -> None:
    """Until the deadline of the phase."""
    patch.setattr(quiescing, "loss", lambda _: "")
    patch.setattr(changing, "loss", lambda _: "")


def everybody_is_a_trainer(patch: Patch) -> None:
    """Whatever spec.trainers says."""
    patch.setattr(sender, "trainers", lambda update: frozenset({update.world.sender.account}))


def any_process_of_the_account_may_call(patch: Patch) -> None:
    """The guard does not read the header."""
    patch.setattr(NativeRoutes, "stranger", lambda *_: "")


def digests_are_not_compared(patch: Patch) -> None:
    """Nowhere: not with what was told, not among engines, nor the probe."""
    patch.setattr(changing, "_unlike", lambda *_: "")
    patch.setattr(changing, "agree", lambda *_: frozenset())
    patch.setattr(orders, "holds", lambda weights, version, _: weights.version == version)
    patch.setattr(ModelSession, "finished", lambda *_: None)

    def first(call: Any, update: Any, told: Any) -> Any:
        return call(update, told[:1])

    around(patch, changing, "with_digest", first)


def nothing_counts_as_touched(patch: Patch) -> None:
    """A push that broke half-way is called one that never began."""
    patch.setattr(changing, "is_untouched", lambda *_: True)


def who_waits_makes_all_lost(patch: Patch) -> None:
    """One engine that can load the version from nowhere is taken for all of them."""

    def lost(seen: world.World, committed: Any, stuck: Any, *, told: bool) -> str:
        return "it is stored nowhere" if stuck else ""

    patch.setattr(plan, "weights_lost", lost)


def copies_are_read_from_the_newest_spec_only(patch: Patch) -> None:
    """What was named before the version was raised is not looked for."""
    patch.setattr(plan_weights, "with_stored", lambda update: update)


def the_next_attempt_keeps_its_sender(patch: Patch) -> None:
    """A trainer that was given up is still the one that is named."""

    def again(call: Any, update: Any, *rest: Any) -> Any:
        found = call(update, *rest)
        status = found.status.model_copy(update={"sender": update.status.sender})
        return ending.UpdatePlan(found.record, status, None)

    around(patch, ending, "_try_again", again)
