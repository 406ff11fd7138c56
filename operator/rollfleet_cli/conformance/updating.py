"""The one disruptive part: the committed checkpoint as a new version, asked for as `rollfleet bump` does, under load.

It leaves the fleet as it was, but for the higher version. Interrupted, what was asked for is finished by the operator.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from rollfleet_cli.bumping import Scene, Wish, ask_for, look_at
from rollfleet_cli.cluster import Cluster
from rollfleet_cli.conformance.checks.asking import RANK_HEADER, request
from rollfleet_cli.conformance.checks.check import Held, Member, Subject
from rollfleet_cli.conformance.checks.update import Cached, Moved
from rollfleet_cli.conformance.checks.wire import Call, Exchange
from rollfleet_cli.conformance.reaching import Reached
from rollfleet_cli.conformance.running import CHECK_S, NoStateError, member_of
from rollfleet_cli.errors import CommandError, UnreachableError
from rollfleet_cli.following import GIVE_UP_S, has_reached, look
from rollfleet_operator.api.weightversion import PauseMode, StrategyType, WeightVersion
from rollfleet_operator.clients.errors import RollfleetError

LONG_PROMPT = 272  # tokens: two blocks of the largest size, 128, and some
LOOK_S = 0.5
KEPT_BYTES = 4096  # of a refusal's body, of each request under load; of other answers version and times are what counts
MOST_RATE, EACH_S = 100, 0.05  # requests a second in all, and seconds between two at one engine: no fleet feels them
SETTLE_S = 1.0  # of load before and after, so that both versions are seen
GRACE_S = 60.0  # over the deadlines of the WeightVersion
Tell = Callable[[str], None]


def why_not(scene: Scene) -> str:
    """Why there is nothing to move to; empty where there is."""
    committed, charge = scene.committed, scene.charge
    if committed is None or not committed.checkpoint:
        return "the committed version has no stored checkpoint: it was loaded at start, or pushed"
    if charge is None:
        return "no WeightVersion names the fleet"
    if charge.spec.version != committed.version:
        return f"version {charge.spec.version} is asked for and not committed"
    if scene.fleet.status.serving_replicas < scene.fleet.spec.replicas:
        serving = scene.fleet.status.serving_replicas
        return f"{serving} of {scene.fleet.spec.replicas} engines serve: an update would be about the others"
    return ""


def longest_s(charge: WeightVersion) -> float:
    """Seconds that the operator may take."""
    given = charge.spec.deadlines
    phases = given.prepare_seconds + given.quiesce_seconds + given.transfer_seconds + given.verify_seconds
    return phases + GRACE_S


def mixes(charge: WeightVersion) -> str:
    """Why clients may see both versions; empty where they may not."""
    if charge.spec.strategy.type is StrategyType.ROLLING:
        return "spec.strategy is Rolling: answers of both versions are right while it rolls"
    if charge.spec.pause.mode is PauseMode.KEEP:
        return "spec.pause.mode is keep: kept requests span both versions"
    return ""


@dataclass
class Load:
    """Small requests to every engine, one after the other at each, until it is told to stop."""

    engines: Sequence[Reached]

    def __post_init__(self) -> None:
        self.seen: list[tuple[str, Exchange]] = []
        self._tasks = [asyncio.create_task(self._ask(each), name="conformance-load") for each in self.engines]

    async def stop(self) -> None:
        """No more; what is under way is given up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, engine: Reached) -> None:
        call = request(engine.subject)
        while True:
            self.seen.append((engine.subject.pod, kept(await engine.transport.carry(call))))
            await asyncio.sleep(max(EACH_S, len(self.engines) / MOST_RATE))


def kept(exchange: Exchange) -> Exchange:
    """What is judged of an answer under load: there are many of them, and an engine chooses how long each is."""
    return replace(exchange, body=b"" if exchange.status == 200 else exchange.body[:KEPT_BYTES])


async def move(
    cluster: Cluster, scene: Scene, engines: Sequence[Reached], within_s: float, allowed: Decimal, tell: Tell
) -> Moved:
    """The update, with what was seen before, during and after it."""
    committed, charge = scene.committed, scene.charge
    if committed is None or charge is None or not committed.checkpoint:
        raise ValueError("there is nothing to move to: why_not() is asked first")
    was = await _members(engines)
    await _long(engines)
    warm = await _long(engines)
    load = Load(engines)
    try:
        await asyncio.sleep(SETTLE_S)
        asked = await asyncio.to_thread(
            ask_for, cluster, *_place(scene), Wish(committed.checkpoint, charge.spec.step, committed.version + 1)
        )
        tell(asked.words())
        outcome = await _until_served(cluster, scene, asked.version, within_s)
        firsts, agains = await _long(engines), await _long(engines)
        await asyncio.sleep(SETTLE_S)
    finally:
        await load.stop()
    after = (await asyncio.to_thread(look_at, cluster, *_place(scene))).committed
    places = [f"{each.subject.pod} rank {rank}" for each in engines for rank in range(each.subject.ranks)]
    return Moved(
        before=committed.version,
        wanted=asked.version,
        outcome=outcome,
        held=None if after is None else Held(after.version, after.digest),
        old_digest=committed.digest,
        was=was,
        members=await _members(engines),
        load=tuple(load.seen),
        cached=() if outcome else tuple(Cached(*each) for each in zip(places, warm, firsts, agains, strict=True)),
        allowed=allowed,
        mixes=mixes(charge),
    )


def _place(scene: Scene) -> tuple[str, str]:
    return scene.fleet.metadata.namespace, scene.fleet.metadata.name


async def _until_served(cluster: Cluster, scene: Scene, version: int, within_s: float) -> str:
    """Empty once the fleet serves it; else why it does not. An answer that does not come is asked for again."""
    answered = time.monotonic()
    ends, told = answered + within_s, ""
    while True:
        try:
            view = await asyncio.to_thread(look, cluster, *_place(scene))
            answered, told = time.monotonic(), f"{view.state}: {view.message}"
            if has_reached(view, version, exactly=True) and view.serving >= view.desired:
                return ""
        except UnreachableError as error:
            told = str(error)
            if time.monotonic() - answered > GIVE_UP_S:
                return told
        except CommandError as error:
            return str(error)
        if time.monotonic() >= ends:
            return f"not served within {within_s:.0f} s: {told}"
        await asyncio.sleep(LOOK_S)


async def _members(engines: Sequence[Reached]) -> tuple[Member, ...]:
    return tuple(await asyncio.gather(*(told_by(each) for each in engines)))


async def told_by(engine: Reached) -> Member:
    """What the engine says of itself now, or why it says nothing."""
    try:
        async with asyncio.timeout(CHECK_S):
            await engine.renew()
            return await member_of(engine.transport, engine.subject)
    except TimeoutError:
        why = f"no answer within {CHECK_S:g} s"
    except (NoStateError, RollfleetError) as error:
        why = str(error)
    return Member(engine.subject.pod, engine.subject.state, None, why)


async def _long(engines: Sequence[Reached]) -> list[Exchange]:
    """A long prompt on every rank of every engine, in their order: each rank has a cache of its own."""
    places = [(each, rank) for each in engines for rank in range(each.subject.ranks)]
    calls = (each.transport.carry(long_prompt(each.subject, rank)) for each, rank in places)
    return list(await asyncio.gather(*calls))


def long_prompt(subject: Subject, rank: int) -> Call:
    """One that fills blocks of this rank's prefix cache, under a salt of its own."""
    tokens = subject.probe_tokens * (1 + LONG_PROMPT // len(subject.probe_tokens))
    longer = replace(subject, probe_tokens=tokens[:LONG_PROMPT])
    return request(longer, 1, ((RANK_HEADER, str(rank)),))
