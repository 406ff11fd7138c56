"""What the sender's Lease says: who holds it, since when, and what of that is news."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from rollfleet_operator.core.observed import SenderView
from rollfleet_operator.ports import LEASES, ROLLOUT_ENGINES, SERVICE_ACCOUNTS, WEIGHT_VERSIONS, Manifest
from rollfleet_operator.runtime.senders import SenderStore
from tests.support.desk import KEY, NOW, Desk, make_fleet, make_version

OFFER = "w-1/1"


def make_lease(revision: int = 1, holder: str = "grpo/1", renewed: str = "t1", **annotations: str) -> Manifest:
    return {
        "metadata": {
            "name": "qwen-sender",
            "namespace": "rl",
            "resourceVersion": str(revision),
            "labels": {"rollfleet.io/fleet": "qwen", "rollfleet.io/component": "sender"},
            "annotations": {f"rollfleet.io/{name}": value for name, value in annotations.items()},
        },
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": renewed},
    }


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now

    def goes(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> SenderStore:
    return SenderStore(clock)


def test_a_renewal_is_noted_and_is_no_news(store: SenderStore, clock: Clock) -> None:
    assert store.told(make_lease(offers=OFFER)) == KEY
    clock.goes(5)
    assert store.told(make_lease(2, renewed="t2", offers=OFFER)) is None
    assert store.view(KEY) == SenderView("grpo/1", 15.0, NOW + timedelta(seconds=5), OFFER)


@pytest.mark.parametrize(
    "change", [{"offers": "w-1/2"}, {"holder": "grpo/2"}, {"offers": OFFER, "sender-message": "no"}]
)
def test_whatever_else_it_says_is_news(store: SenderStore, change: dict[str, Any]) -> None:
    store.told(make_lease(offers=OFFER))
    assert store.told(make_lease(2, **change)) == KEY


def test_a_write_that_renews_nothing_makes_nobody_younger(store: SenderStore, clock: Clock) -> None:
    store.told(make_lease())
    clock.goes(10)
    store.told(make_lease(2, offers=OFFER))
    assert store.view(KEY).renewed == NOW
    assert not store.is_stale(KEY)
    clock.goes(5)
    assert store.is_stale(KEY)


def test_the_account_is_looked_at_anew_for_each_offer(store: SenderStore) -> None:
    """It may have been made again under its name while the trainer lived on: guards take tokens of the new one only."""
    store.told(make_lease(offers=OFFER))
    store.identified(KEY, "grpo/1", "uid-1")
    store.told(make_lease(2, renewed="t2", offers=OFFER))
    assert store.view(KEY).uid == "uid-1"
    store.told(make_lease(3, renewed="t3", offers="w-1/2"))
    assert store.view(KEY).uid == ""


def test_what_a_list_shows_too_late_changes_nothing(store: SenderStore) -> None:
    store.told(make_lease(3, holder="grpo/2"))
    assert store.told(make_lease(2)) is None
    assert store.view(KEY).account == "grpo"
    assert store.view(KEY).holder == "grpo/2"


def test_the_account_is_looked_up_again_for_another_holder(store: SenderStore) -> None:
    store.told(make_lease())
    store.identified(KEY, "grpo/1", "a-1")
    store.told(make_lease(2, renewed="t2"))
    assert store.view(KEY).uid == "a-1"
    store.told(make_lease(3, holder="grpo/2"))
    assert store.view(KEY).uid == ""
    store.identified(KEY, "grpo/1", "a-1")
    assert store.view(KEY).uid == "", "the answer came for the one before"


def test_other_leases_are_not_ours(store: SenderStore) -> None:
    other = make_lease()
    other["metadata"]["labels"] = {"rollfleet.io/fleet": "qwen"}
    assert store.told(other) is None
    assert store.view(KEY) == SenderView()


def test_a_lease_of_another_name_speaks_for_nobody_whatever_its_labels(store: SenderStore) -> None:
    """Who may make Leases, for an election of its own say, is not who may write the fleet's: RBAC goes by names."""
    store.told(make_lease(offers=OFFER))
    forged = make_lease(99, holder="grpo/forged", offers="w-1/2")
    forged["metadata"]["name"] = "election"
    assert store.told(forged) is None
    assert store.told(forged, deleted=True) is None
    assert store.view(KEY).holder == "grpo/1"
    assert store.told(make_lease(2, offers="w-1/2")) == KEY, "later words of the real one count"


def test_what_a_trainer_writes_is_bounded(store: SenderStore) -> None:
    store.told(make_lease(holder="g" * 10_000, offers="o" * 10_000, **{"sender-message": "m" * 10_000}))
    view = store.view(KEY)
    assert max(len(view.holder), len(view.offers), len(view.message)) == 512


def test_a_lease_that_is_deleted_is_nobody_s(store: SenderStore) -> None:
    store.told(make_lease())
    assert store.told(make_lease(2), deleted=True) == KEY
    assert store.view(KEY) == SenderView()


# --- a pass


def pushed(desk: Desk) -> None:
    """A fleet with trainers, and a WeightVersion that waits for one."""
    fleet = make_fleet(resourceVersion="1")
    fleet["spec"] |= {"trainers": [{"serviceAccountName": "grpo"}], "weightTransfer": {"backend": "gloo"}}
    desk.cluster.put(ROLLOUT_ENGINES, "rl", fleet)
    version = make_version()
    version["spec"]["source"] = {"type": "Trainer"}
    desk.cluster.put(WEIGHT_VERSIONS, "rl", version)


async def test_a_pass_reads_the_lease_before_it_calls_anybody_gone(desk: Desk) -> None:
    pushed(desk)
    desk.cluster.put(LEASES, "rl", make_lease(offers=OFFER))
    desk.cluster.put(SERVICE_ACCOUNTS, "rl", {"metadata": {"name": "grpo", "namespace": "rl", "uid": "a-1"}})
    await desk.run()
    assert desk.observed is not None
    assert replace(desk.observed.sender, renewed=None) == SenderView("grpo/1", 15.0, None, OFFER, "", "a-1")


@pytest.mark.parametrize("holder", ["grpo/1", "../../nodes/1", "Gr PO"])
async def test_an_account_that_is_not_there_has_no_uid(desk: Desk, holder: str) -> None:
    pushed(desk)
    desk.cluster.put(LEASES, "rl", make_lease(holder=holder, offers=OFFER))
    await desk.run()
    assert desk.observed is not None
    assert (desk.observed.sender.holder, desk.observed.sender.uid) == (holder, "")


async def test_without_a_lease_there_is_nobody(desk: Desk) -> None:
    pushed(desk)
    await desk.run()
    assert desk.observed is not None
    assert desk.observed.sender == SenderView()


async def test_fleets_that_wait_for_no_trainer_cost_no_request(desk: Desk) -> None:
    """The Lease of a fleet that is fed by checkpoints is never read, whoever holds it."""
    desk.cluster.put(LEASES, "rl", make_lease(offers=OFFER))
    await desk.run()
    assert desk.observed is not None
    assert desk.observed.sender == SenderView()
