"""A trainer's process in the model: it takes the Lease, renews it, offers what is asked for, and sends when it may.

How a Lease is judged, what is written into it, and what a WeightVersion says to its sender are the SDK's own code; its
loop is modelled with everything that can go wrong in it. A process may stand still at any moment, also between asking
whether it may send and sending; a rude one asks nobody.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rollfleet_engine.guard.identity import Caller
from rollfleet_operator.api.weightversion import SourceType
from rollfleet_operator.clients.errors import Conflict, NotFound, RollfleetError
from rollfleet_protocol.senders import offer
from rollfleet_trainer.keeper import JITTER, LOOK_S, RETRY_S
from rollfleet_trainer.leases import DURATION_S, PERIOD_SHARE, RENEW_SHARE, LeaseRecord, Rival, holding, releasing
from rollfleet_trainer.looks import Asked, Look, Standing, judge
from rollfleet_trainer.versions import in_charge, is_under_way
from tests.model.api_server import ApiServer
from tests.model.clock import Clock
from tests.model.network import Network
from tests.model.nodes import Nodes
from tests.model.senders import SenderLease
from tests.model.sending import Sending
from tests.support.builders import FLEET, NAMESPACE

THAW_S = 1.0
LATE_S = 0.5  # at most, until a trainer hears of a WeightVersion
SETTLE_S = 3.0  # after a failed send, as in the SDK
AGAIN_S = 1.0  # until a training loop that was told of a failure asks anew


@dataclass
class Manner:
    """What a trainer does wrong; most of it once."""

    stalls: tuple[str, float] | None = None  # before this phase, for so long
    dies_in: str = ""  # this phase, after calling some of the engines
    tells: str = "right"  # digest: right, none, wrong, apart (different ones to different engines)
    flips: int | None = None  # the engine (by seat) that gets other bytes
    vouches_for_flips: bool = False  # and is told their digest
    misfits: str = ""  # the phase in which engines hear that its tensors are not the model's
    sends_old: bool = False  # the bytes of the step before
    offers_other: int = 0  # a version so far from the one that is asked for
    steals: bool = False  # it takes the Lease from whoever holds it
    is_rude: bool = False  # it sends without the Lease, to engines that wait for another one


@dataclass
class Run:
    """A version that this trainer means to send."""

    asked: Asked
    over: bool = False
    served: int = 0  # epoch of the attempt that was sent for last
    failed: bool = False
    withdrawn: bool = False
    sending: Sending | None = None
    look: Look = field(default_factory=lambda: Look(Standing.WAITING))


class Trainer:
    """A process that comes and goes; each life is an instance of its own."""

    def __init__(
        self,
        name: str,
        account: str,
        drift: float,
        clock: Clock,
        rng: random.Random,
        api: ApiServer,
        lease: SenderLease,
        nodes: Nodes,
        network: Network,
    ) -> None:
        self.name = name
        self.account = account
        self.clock = clock
        self.rng = rng
        self.nodes = nodes
        self.network = network
        self.manner = Manner()
        self.up = False
        self.willing = True  # offers what is asked for
        self.frozen_until = -1.0
        self.freezes_s = 0.0  # for so long, between asking whether it may send and sending,
        self.freezes_in = ""  # in this phase
        self.cut_until = -1.0  # from the API server
        self.on_word: Callable[[str], None] = lambda _: None  # what it does, for whoever looks
        self.late_calls = 0
        self.lost_leases = 0
        self.counts: dict[str, int] = {}
        self._drift = drift
        self._api = api
        self._store = lease
        self._life = 0
        self._uid = ""
        self._forget_all()
        api.watches.append(self._hear)

    # its life -------------------------------------------------------------------------------------------------------

    def _forget_all(self) -> None:
        self.holder = f"{self.account}/{self.name}-{self._life}"
        self.run: Run | None = None
        self._lease = LeaseRecord()
        self._rival = Rival(self.holder)
        self._holds_until = -1.0
        self._offers = self._message = ""
        self._taking = False
        self._term = 0  # of holding the Lease

    def start(self) -> None:
        """A new process."""
        self._life += 1
        self.up = True
        self._forget_all()
        self._hear()

    @property
    def caller(self) -> Caller:
        """By a token that is asked for now; where there is no account, by the last one."""
        self._uid = self._store.accounts.get(self.account, self._uid)
        return Caller(f"system:serviceaccount:{NAMESPACE}:{self.account}", self._uid)

    def kill(self, down_s: float | None) -> None:
        """Gone in the middle of whatever it did; back later, or never."""
        self.up = False
        self._life += 1
        life = self._life
        if down_s is not None:
            self.clock.later(down_s, lambda: self.start() if self._life == life else None)

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """In this life, and not while it stands still."""
        life = self._life
        self.clock.later(delay_s, lambda: self._unless_frozen(act, life))

    def _unless_frozen(self, act: Callable[[], None], life: int) -> None:
        if self._life != life:
            return
        if self.clock.time < self.frozen_until:
            left_s = self.frozen_until - self.clock.time
            self.clock.later(min(left_s, THAW_S), lambda: self._unless_frozen(act, life))
        else:
            act()

    def _now(self) -> float:
        return self.clock.time * self._drift  # its own monotonic clock

    def calm_down(self) -> None:
        """Nothing bad happens any more."""
        self.manner = Manner()
        self.willing, self.frozen_until, self.freezes_s, self.cut_until = True, -1.0, 0.0, -1.0

    # the Lease ------------------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether nobody else can hold the Lease by now, as it believes."""
        return self._now() < self._holds_until

    def _read(self) -> None:
        if self.clock.time < self.cut_until:
            raise RollfleetError("this trainer does not reach the API server")
        self._lease = LeaseRecord.of(self._store.read())

    def _write(self) -> bool:
        """Take or renew it over exactly what was read; the time counts from before the request."""
        began_s = self._now()
        if self.clock.time < self.cut_until:
            raise RollfleetError("this trainer does not reach the API server")
        patch = holding(self._lease, self.holder, int(DURATION_S), self.clock.now(), self._offers, self._message)
        try:
            self._api.write_lease(lambda: self._store.patch(patch))
        except Conflict:
            return False
        self._lease = LeaseRecord.of(self._store.read())
        self._holds_until = began_s + DURATION_S * RENEW_SHARE
        self.on_word("holds the Lease")
        return True

    def _take(self) -> None:
        if self.holds():
            self._taking = False
            self._hear()
            return
        wait_s = RETRY_S
        try:
            self._read()
            free_in_s = 0.0 if self.manner.steals else self._rival.saw(self._lease, self._now())
            if free_in_s <= 0 and self._write():
                self._taking = False
                self._term += 1
                self._renew_later(self._pause())
                self._hear()
                return
            wait_s = min(max(free_in_s, RETRY_S), LOOK_S)
        except RollfleetError:
            pass
        self.later(wait_s, self._take)

    def _pause(self) -> float:
        return DURATION_S * PERIOD_SHARE * self.rng.uniform(1 - JITTER, 1.0)

    def _renew_later(self, delay_s: float) -> None:
        term = self._term
        self.later(delay_s, lambda: self._renew() if self._term == term else None)

    def _renew(self) -> None:
        """As the SDK's keeper: until it is lost, which it is in time."""
        if not self.holds():
            self._lose()
            return
        try:
            if not self._write():
                self._read()
                if self._lease.holder != self.holder:
                    self._lose()
                    return
                self._renew_later(RETRY_S)
                return
        except NotFound:
            self._lose()
            return
        except RollfleetError:
            self._renew_later(RETRY_S)
            return
        self._renew_later(self._pause())

    def _lose(self) -> None:
        self.lost_leases += 1
        self.on_word("has lost the Lease")
        self._holds_until = -1.0
        self._rival = Rival(self.holder)
        self._offers = self._message = ""
        if self.run is not None:
            self._end("the Lease is lost")
        self.later(AGAIN_S, self._hear)

    def release(self) -> None:
        """It gives the Lease back, and takes it again when something is asked for that it has."""
        if not self.holds():
            return
        self._holds_until, self._offers = -1.0, ""
        self._term += 1
        try:
            patch = releasing(self._lease, self.clock.now(), "")
            self._api.write_lease(lambda: self._store.patch(patch))
        except RollfleetError:
            return

    def _say(self, offers: str, message: str = "") -> None:
        """Offer this, or nothing and why; again until it is written, or the Lease lost."""
        self._offers, self._message = offers, message
        self.on_word(f"offers {offers!r} {message}")
        if not self.holds():
            return
        try:
            if self._write():
                return
            self._read()
        except RollfleetError:
            pass
        self.later(RETRY_S, lambda: self._say(offers, message) if self._offers == offers else None)

    def give_up(self, seconds: float, message: str) -> None:
        """It offers nothing any more, says why, and comes back to it."""
        self.willing = False
        self._end(message)

        def again() -> None:
            self.willing = True
            self._hear()

        self.later(seconds, again)

    # what it hears --------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        if self.up:
            self.later(self.rng.uniform(0.001, LATE_S), self._take_in)

    def _take_in(self) -> None:
        if self._api.down or self.clock.time < self.cut_until:
            self.later(RETRY_S, self._take_in)
            return
        pushed = [each for each, _ in self._api.weight_versions.values() if each.spec.source.type is SourceType.TRAINER]
        if not pushed or not self._api.fleet_present:
            self._end("")
            return
        engine = self._api.fleet.dump()
        charge = in_charge([each.dump() for each, _ in self._api.weight_versions.values()], engine)
        if charge is None or charge["spec"]["source"]["type"] != "Trainer":
            self._end("")
            return
        meta, version = charge["metadata"], int(charge["spec"]["version"])
        asked = Asked(NAMESPACE, FLEET, meta["name"], meta["uid"], version, int(meta["generation"]))
        if self.run is None or self.run.asked != asked:
            self._begin(asked, wanted=is_under_way(charge))
        run = self.run
        if run is None or run.over:
            return
        chosen = ((charge.get("status") or {}).get("sender") or {}).get("holder", self.holder)
        run.look = judge(charge, asked, chosen if self.manner.is_rude else self.holder)
        self._follow(run)

    def _begin(self, asked: Asked, *, wanted: bool) -> None:
        if self.run is not None:
            self._end("")
        self.run = None
        if not wanted or not self.willing:
            return
        if not self.holds():
            if not self._taking and not (self.manner.is_rude and not self.manner.steals):
                self._taking = True
                self.later(0.0, self._take)
            if not self.manner.is_rude:
                return
        self.run = Run(asked)
        self._offer(self.run)

    def _offer(self, run: Run) -> None:
        self._say(offer(run.asked.uid, max(1, run.asked.version + self.manner.offers_other)))

    def _follow(self, run: Run) -> None:
        look = run.look
        if look.standing in (Standing.ACTIVE, Standing.ENDED):
            self._end("" if look.error is None else str(look.error))
            if look.phase not in ("Failed", "Active"):  # the training loop asks anew
                self.later(AGAIN_S, self._ask_anew)
            return
        if run.failed and look.epoch != run.served and run.withdrawn:
            run.withdrawn = False
            self._offer(run)
        if look.standing is Standing.READY and look.epoch != run.served and (self.holds() or self.manner.is_rude):
            run.served, run.failed = look.epoch, False
            run.sending = Sending(self, run.asked.version, look, lambda error: self._sent(run, error))
            run.sending.go()

    def _ask_anew(self) -> None:
        if self.run is not None and self.run.over:
            self.run = None
        self._hear()

    def _sent(self, run: Run, error: str) -> None:
        """What failed on our side only would last until the transfer's deadline: end it, and stand ready again."""
        if not error:
            return
        run.failed = True
        if run.sending is not None and run.sending.phase == "finish":
            return

        def withdraw() -> None:
            if self.run is run and not run.over and run.look.epoch == run.served and not run.withdrawn:
                run.withdrawn = True
                self._say("", error)

        self.later(SETTLE_S, withdraw)

    def _end(self, message: str) -> None:
        run = self.run
        if run is None or run.over:
            return
        run.over = True
        if run.sending is not None:
            run.sending.stop()
        if self._offers:
            self._say("", message)

    def may_send(self, run_epoch: int, version: int) -> str:
        """Why not; empty where it may, as far as this process knows."""
        if self.manner.is_rude:
            return ""
        run = self.run
        if run is None or run.over or run.asked.version != version:
            return "superseded"
        if not self.holds():
            return "the Lease is lost"
        return "" if run.look.epoch == run_epoch else "the operator has ended this attempt"
