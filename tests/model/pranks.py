"""What happens to trainers, and what they do wrong: one method for each word of `schedule.KINDS`."""

from dataclasses import replace

from tests.model.api_server import ApiServer
from tests.model.clock import Clock
from tests.model.network import Cut, Network
from tests.model.nodes import Nodes
from tests.model.people import People
from tests.model.promises import Auditor
from tests.model.schedule import Happening
from tests.model.senders import ACCOUNTS, SenderLease
from tests.model.trainers import Trainer

CALLS = ("init", "start", "update", "finish")
TELLS = ("none", "wrong", "apart")
SILENCES_S = (1.0, 8.0, 40.0, 120.0)  # for which a trainer that died stays away
LASTS_S = 15.0  # at least: until the push that it shall be about has begun
ANOTHERS = (-1, 1, 5)  # versions that are offered instead of the one that is asked for


class Pranks(People):
    """Does it."""

    def __init__(
        self,
        clock: Clock,
        api: ApiServer,
        nodes: Nodes,
        network: Network,
        senders: SenderLease,
        trainers: list[Trainer],
        auditor: Auditor,
    ) -> None:
        super().__init__(clock, api, nodes, auditor)
        self._network = network
        self._senders = senders
        self._trainers = trainers

    def _trainer(self, blow: Happening) -> Trainer:
        """Of those that live, if one does."""
        living = [each for each in self._trainers if each.up] or self._trainers
        return living[blow.who % len(living)]

    def _phase(self, blow: Happening) -> str:
        return CALLS[blow.luck % len(CALLS)]

    def _then_push(self, blow: Happening) -> None:
        """The version that it happens to: what a digit of luck decided is no longer in it."""
        self.push(replace(blow, luck=blow.luck // len(CALLS)))

    def kill_trainer(self, blow: Happening) -> None:
        """A new process comes later."""
        self._trainer(blow).kill(SILENCES_S[blow.luck % len(SILENCES_S)])

    def kill_trainer_in_phase(self, blow: Happening) -> None:
        """Between two calls of the next push, or when some of the engines have heard the call."""
        self._trainer(blow).manner.dies_in = self._phase(blow)
        self._then_push(blow)

    def freeze_trainer(self, blow: Happening) -> None:
        """It stands still, now or when it is about to send, and goes on with what it was about to do."""
        trainer = self._trainer(blow)
        if blow.luck % 4:
            trainer.freezes_s, trainer.freezes_in = blow.seconds, self._phase(blow)
            self._then_push(blow)
        else:
            trainer.frozen_until = self._clock.time + blow.seconds

    def stall_trainer(self, blow: Happening) -> None:
        """It lives, and does not come to the next call for a while."""
        self._trainer(blow).manner.stalls = self._phase(blow), blow.seconds
        self._then_push(blow)

    def second_trainer(self, blow: Happening) -> None:
        """Another process of the same account, or of another one that may push as well, or of one that may not."""
        for trainer in self._trainers:
            if not trainer.up:
                trainer.account = ("grpo", "grpo", "ppo", "stranger")[blow.luck % 4]
                trainer.start()
                self._clock.later(10 * blow.seconds, lambda trainer=trainer: trainer.kill(None))  # type: ignore[misc]

    def rude_trainer(self, blow: Happening) -> None:
        """A second one: takes the Lease from whoever holds it, sends to engines that wait for another, or both."""
        self.second_trainer(blow)
        manner = self._trainers[-1].manner
        manner.steals, manner.is_rude = blow.luck % 3 != 1, blow.luck % 3 != 0

        def mend() -> None:
            manner.steals = manner.is_rude = False

        self._clock.later(blow.seconds, mend)

    def lie(self, blow: Happening) -> None:
        """From now on for a while it tells no digest, another one than it sent, or different ones."""
        manner = self._trainer(blow).manner
        manner.tells = TELLS[blow.luck % len(TELLS)]

        def mend() -> None:
            manner.tells = "right"

        self._clock.later(max(LASTS_S, blow.seconds), mend)
        self._then_push(blow)

    def flip(self, blow: Happening) -> None:
        """For a while one engine gets other bytes than the rest."""
        manner = self._trainer(blow).manner
        manner.flips, manner.vouches_for_flips = blow.who % 3, bool(blow.luck % 2)
        if blow.luck % 3 == 0:
            manner.tells = "none"

        def mend() -> None:
            manner.flips, manner.vouches_for_flips, manner.tells = None, False, "right"

        self._clock.later(max(LASTS_S, blow.seconds), mend)
        self._then_push(blow)

    def misfit(self, blow: Happening) -> None:
        """For a while it sends tensors that the model has not, and says so at the start of an update or later."""
        manner = self._trainer(blow).manner
        manner.misfits = ("start", "update")[blow.who % 2]

        def mend() -> None:
            manner.misfits = ""

        self._clock.later(max(LASTS_S, blow.seconds), mend)
        self._then_push(blow)

    def old_step(self, blow: Happening) -> None:
        """It comes back from a checkpoint of its own: dies, and sends the step before as this version."""
        trainer = self._trainer(blow)
        trainer.kill(1.0)
        trainer.manner.sends_old = True

        def mend() -> None:
            trainer.manner.sends_old = False

        self._clock.later(max(LASTS_S, blow.seconds), mend)
        self._then_push(blow)

    def offer_another(self, blow: Happening) -> None:
        """It stands ready with a version that nobody asks for."""
        trainer = self._trainer(blow)
        trainer.manner.offers_other = ANOTHERS[blow.luck % len(ANOTHERS)]

        def mend() -> None:
            trainer.manner.offers_other = 0
            trainer.give_up(0.5, "another version")

        self._clock.later(blow.seconds, mend)

    def give_up(self, blow: Happening) -> None:
        """It says why, and comes back to it."""
        self._trainer(blow).give_up(blow.seconds, "NaN in the gradients")

    def release_lease(self, blow: Happening) -> None:
        """In the middle of whatever is under way."""
        self._trainer(blow).release()

    def cut_trainer(self, blow: Happening) -> None:
        """From one engine, in both directions or one."""
        hosts = sorted(self._nodes.hosts.values(), key=lambda host: host.uid)
        if hosts:
            kind = Cut.ANSWERS if blow.luck % 2 else Cut.BOTH
            self._network.cut(self._trainer(blow).name, hosts[blow.who % len(hosts)].uid, kind, blow.seconds)

    def cut_trainer_from_api(self, blow: Happening) -> None:
        """It cannot renew."""
        self._trainer(blow).cut_until = self._clock.time + blow.seconds

    def account_anew(self, blow: Happening) -> None:
        """Its ServiceAccount was deleted, and is made again under the same name: another uid, and the process lives."""
        account = self._trainer(blow).account
        self._senders.accounts.pop(account, None)

        def make() -> None:
            if account in self._senders.accounts:
                return  # all is well again
            self._senders.accounts[account] = f"{account}-{self._clock.time:g}"

        self._clock.later(blow.seconds / 10, make)

    def mend_trainers(self) -> None:
        """They live, may push, and do what is right. One of them is enough."""
        self.trainers_on()
        self._senders.accounts = ACCOUNTS | self._senders.accounts
        for trainer in self._trainers:
            trainer.calm_down()
            if trainer.account not in ("grpo", "ppo"):
                trainer.kill(None)
                trainer.account = "grpo"
            if trainer is self._trainers[0] and not trainer.up:
                trainer.start()
