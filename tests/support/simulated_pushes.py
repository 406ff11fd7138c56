"""Fleets that trainers push to, in the simulated world."""

from typing import Any

from rollfleet_operator.api.launch import TrainerRef, WeightTransfer
from rollfleet_operator.api.weightversion import FailureType, OnFailure
from rollfleet_protocol.launch_settings import TransferBackend
from tests.support.builders import make_fleet
from tests.support.simulated_trainer import ACCOUNT, PUSHED, Trainer
from tests.support.simulated_updates import bump
from tests.support.simulated_world import World

TRAINERS = (TrainerRef(service_account_name=ACCOUNT),)
GLOO = WeightTransfer(backend=TransferBackend.GLOO)
NO_RETRY = OnFailure(type=FailureType.RETRY, max_attempts=1)


def make_world(replicas: int = 3, **options: Any) -> World:
    """A fleet whose trainers may push, at version 0."""
    world = World(make_fleet(replicas=replicas, trainers=TRAINERS, weight_transfer=GLOO), **options)
    assert world.run(60, lambda: world.all_serve(0))
    return world


def ask(world: World, version: int, **spec: Any) -> None:
    """Bump without offering."""
    bump(world, version, source=PUSHED, **spec)


def push(world: World, version: int, trainer: Trainer | None = None, **spec: Any) -> Trainer:
    """Bump, take the Lease, offer."""
    ask(world, version, **spec)
    sender = world.lease.take(trainer or Trainer())
    sender.offer(world, version)
    return sender
