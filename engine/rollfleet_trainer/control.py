"""The trainer's dealings with the API server: the Lease, the WeightVersion, and what it says from then on.

All of it runs in the loop of the SDK's own thread; `look` and `may_send` may be asked from any thread.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollfleet_protocol.engine_config import FleetIdentity
from rollfleet_protocol.senders import account_of, holder_identity, offer
from rollfleet_trainer import copies, turns
from rollfleet_trainer.apiserver import API, ApiServer, path_of
from rollfleet_trainer.background import Background
from rollfleet_trainer.errors import (
    ApiServerError,
    ConflictError,
    DeniedError,
    NotFoundError,
    NotPossible,
    SenderLost,
    TransferError,
    UnauthorizedError,
    UnreachableError,
)
from rollfleet_trainer.keeper import Keeper
from rollfleet_trainer.looks import Asked, Attempt, Look, Manifest, Patience, Serving, Standing, attempt_of, judge
from rollfleet_trainer.sending import Fleet
from rollfleet_trainer.stops import Stop
from rollfleet_trainer.tokens import Tokens, account_of_caller
from rollfleet_trainer.versions import (
    Plan,
    Wish,
    in_charge,
    is_written,
    own_name,
    plan,
    require_account,
    require_pushes,
    trainers_of,
)

logger = logging.getLogger("rollfleet.trainer")

NO_NAME = re.compile("[^A-Za-z0-9.-]")  # characters that no host's name has
NO_POD = "none"  # in the place of a pod's uid: a token for it is good at no engine
AGAIN_S, LONGEST_AGAIN_S = 0.5, 5.0  # before the API server is asked again
SLICE_S = 0.5  # of waiting: how late the loss of a Lease is told at most


class Control:
    """One fleet, seen by one trainer process."""

    def __init__(
        self,
        background: Background,
        namespace: str,
        name: str,
        *,
        kubeconfig: str | Path | None,
        service_account: str | None,
        lease_duration_s: int,
    ) -> None:
        self._background = background
        self._namespace, self._name = namespace, name
        self._kubeconfig, self._service_account = kubeconfig, service_account
        self._duration_s = lease_duration_s
        self._api: ApiServer | None = None
        self._may_follow = False  # tried, and none of it failed since
        self._connecting = asyncio.Lock()  # an update and a publication may want it at once
        self._engine: Manifest = {}
        self._weight_version: Manifest = {}
        self._asked: Asked | None = None
        self._patience: Patience | None = None
        self._following: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._away = ""  # why nothing is heard of the API server
        self._stop = Stop()
        self._withheld = False  # not offered yet: the operator shall see first that the attempt before has ended
        self._look = Look(Standing.WAITING)
        self.keeper: Keeper | None = None
        self.tokens: Tokens | None = None

    async def spec(self) -> Manifest:
        """RolloutEngine.spec as it is now. Raises where this process may not send to the fleet."""
        await self._connected()
        found: Manifest = self._engine["spec"]
        return found

    # --- asking for a version

    def heed(self, stop: Stop) -> None:
        """The call that begins is ended by this one, from now on: it may be told to before it asks for anything."""
        self._stop = stop

    async def ask(self, wish: Wish, wait_s: float) -> Asked:
        """Take the Lease, ask for the version, and offer it."""
        self._stop.check()
        api = await self._connected()
        require_pushes(self._engine)
        keeper = self._keeper
        if not self._may_follow:
            await self._require_rights(api)
            self._may_follow = True
        await keeper.take(wait_s, self._stop.check)
        asked = await self._ask(api, wish)
        self._asked, self._look = asked, judge(self._weight_version, asked, keeper.holder)
        self._patience = Patience(self._weight_version, self._engine, time.monotonic())
        self._withheld = asked.passed is not None and asked.passed.holder == keeper.holder
        if self._withheld:  # an offer that came back at once would not be seen to have gone
            await self.withdraw(f"version {asked.version} is asked for anew")
        elif self._stop.why is None:  # else `next` raises it: whoever hears of versions hears of this one first
            await self.offer()
        self._following = asyncio.create_task(self._follow(api, asked), name=f"news of {asked.name}")
        return asked

    async def offer(self) -> None:
        """Stand ready to send what was asked for."""
        asked = self._required()
        await self._keeper.offer(offer(asked.uid, asked.version))

    async def withdraw(self, message: str) -> None:
        """Send it no more, and say why: this ends the attempt at once instead of at its deadline."""
        await self._keeper.offer("", message)

    async def end(self, message: str = "") -> None:
        """The update has ended for this process. Whatever cannot be told any more is seen by others at a deadline."""
        await self._stop_following()
        if message:
            self._may_follow = False
        if self.keeper is not None and self.keeper.holds():
            with suppress(ApiServerError, SenderLost):
                await self.keeper.offer("", message)

    async def close(self) -> None:
        """Give the Lease back, close connections."""
        await self._stop_following()
        if self.keeper is not None:
            await self.keeper.release()
        if self._api is not None:
            await self._api.close()
            self._api = None

    # --- stored copies, and where samples come from

    async def name_recovery(self, path: str, digest: str) -> int | None:
        """As copies.name_recovery."""
        return await copies.name_recovery(await self._server(), self._namespace, self._name, path, digest)

    async def in_use(self) -> frozenset[str]:
        """As copies.in_use."""
        return await copies.in_use(await self._server(), self._namespace)

    async def serves(self) -> Serving:
        """Where, under which name, and with what."""
        api = await self._server()
        return Serving.of(await self._read_engine(api))

    async def _server(self) -> ApiServer:
        async with self._connecting:
            if self._api is None:
                self._api = await ApiServer.connect(self._kubeconfig)
            return self._api

    async def _stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
            self._following = None

    async def _connected(self) -> ApiServer:
        api = await self._server()
        self._engine = await self._read_engine(api)
        if self.keeper is None:
            account = await self._account(api)
            host = NO_NAME.sub("-", socket.gethostname())[:64]  # it goes into a header of each call
            instance = f"{host}-{secrets.token_hex(4)}"
            holder = holder_identity(account, instance)
            self.keeper = Keeper(api, self._namespace, self._name, holder, self._duration_s)
            self.tokens = Tokens(api, self._background, (self._namespace, account))
        return api

    async def _read_engine(self, api: ApiServer) -> Manifest:
        try:
            return await api.get(path_of(API, self._namespace, "rolloutengines", self._name))
        except NotFoundError as error:
            raise NotFoundError(f"there is no fleet {self._namespace}/{self._name}: {error}") from error
        except UnauthorizedError:
            raise
        except DeniedError as error:  # of other names than the Role's nobody is told whether they are there
            raise DeniedError(f"{error}; or there is no fleet {self._namespace}/{self._name}") from error

    async def _account(self, api: ApiServer) -> str:
        trainers = trainers_of(self._engine)
        named = self._service_account
        if named is None:
            return await account_of_caller(api, self._namespace, trainers)
        if named not in trainers:
            raise NotPossible(
                f"{self._namespace}/{self._name}: {named!r} is none of spec.trainers ({', '.join(trainers)})"
            )
        return named

    async def _require_rights(self, api: ApiServer) -> None:
        """What is needed only once a version was asked for: without it that version could not come to its end."""
        charge = await self._charge(api)
        name = own_name(self._name) if charge is None else charge["metadata"]["name"]
        path = path_of(API, self._namespace, "weightversions")
        with suppress(NotFoundError):  # it may be read, and is not there yet
            await api.get(f"{path}/{name}")
        await api.require_watch(path, name)
        if self.tokens is not None:
            await self.tokens.require_right(self._identity.audience(NO_POD))

    async def _ask(self, api: ApiServer, wish: Wish) -> Asked:
        words = ""
        for turn in range(turns.WRITES):
            if turn:
                await turns.before(turn)
                self._engine = await self._read_engine(api)
            charge = await self._charge(api)
            require_account(charge, account_of(self._keeper.holder))
            planned = plan(self._engine, charge, wish)
            self._stop.check()
            try:
                written = await self._write(api, planned, charge)
            except ConflictError as error:
                words = str(error)
                continue
            except UnreachableError:
                charge = await self._charge(api)  # the answer may have got lost, not the request
                if charge is None or not is_written(planned, charge):
                    raise
                written = charge
            self._weight_version = written
            return self._asked_by(written, attempt_of(written) if planned.body is None else None)
        raise ConflictError(f"{self._namespace}/{self._name}: {turns.WRITES} writes in a row were too late: {words}")

    async def _charge(self, api: ApiServer) -> Manifest | None:
        listed = await api.get(path_of(API, self._namespace, "weightversions"))
        return in_charge(listed.get("items") or (), self._engine)

    async def _write(self, api: ApiServer, planned: Plan, charge: Manifest | None) -> Manifest:
        if planned.body is None and charge is not None:
            return charge
        body: Any = planned.body
        if planned.creates:
            return await api.create(path_of(API, self._namespace, "weightversions"), body)
        return await api.patch(path_of(API, self._namespace, "weightversions", planned.name), body)

    def _asked_by(self, weight_version: Manifest, passed: Attempt | None) -> Asked:
        metadata = weight_version["metadata"]
        return Asked(
            namespace=self._namespace,
            fleet=self._name,
            name=metadata["name"],
            uid=metadata["uid"],
            version=int(weight_version["spec"]["version"]),
            generation=int(metadata["generation"]),
            passed=passed,
        )

    # --- what it says from then on

    @property
    def look(self) -> Look:
        """The newest one."""
        return self._look

    @property
    def weight_version(self) -> Manifest:
        """As it was seen last."""
        return self._weight_version

    async def next(self, seen: Look | None, timeout_s: float) -> Look:
        """The next look that differs from `seen`, or the same after `timeout_s`.

        Raises SenderLost where this process is no longer the sender and still needed, UpdateFailed where a phase
        takes longer than its spec allows.
        """
        ends = time.monotonic() + timeout_s
        while True:
            look, now = self._look, time.monotonic()
            if look.standing in (Standing.ACTIVE, Standing.ENDED):
                return look
            self._stop.check()
            is_needed = look.standing is not Standing.TAKEN
            if self._withheld and is_needed and attempt_of(self._weight_version) != self._required().passed:
                self._withheld = False
                await self.offer()
            if is_needed and not self._keeper.holds():
                raise SenderLost(f"{self._required().place}: {self._keeper.why_lost()}; start the update anew")
            if self._patience is not None and self._patience.left_s(look, now) <= 0:
                raise self._patience.over(look, self._required(), self._away)
            if look != seen or now >= ends:
                return look
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(SLICE_S, ends - now)):
                    await self._changed.wait()

    async def fleet(self) -> Fleet:
        """What a sender needs to know, and tokens for the engines of the newest look."""
        identity = self._identity
        bundle = (self._engine.get("status") or {}).get("caBundle")
        if not bundle:
            raise NotPossible(f"{self._namespace}/{self._name}: status.caBundle is empty: no operator has looked at it")
        if self.tokens is not None:
            await self.tokens.prepare(identity.audience(seat.pod_uid) for seat in self._look.seats)
        return Fleet(
            identity=identity,
            backend=str((self._engine["spec"].get("weightTransfer") or {}).get("backend") or ""),
            ca=base64.b64decode(bundle).decode(),
            holder=self._keeper.holder,
            transfer_s=600.0 if self._patience is None else self._patience.transfer_s,
        )

    def may_send(self, epoch: int) -> None:
        """Raise where this process must not send any more for this attempt: the push is checked by it at each step."""
        look, asked = self._look, self._required()
        self._stop.check()
        if not self._keeper.holds():
            raise SenderLost(f"{asked.place}: {self._keeper.why_lost()}: nothing more is sent")
        if look.error is not None:
            raise look.error
        if look.epoch != epoch:
            raise TransferError(f"{asked.place}: the operator has ended this attempt: {look.message}")

    def stop(self, why: Exception) -> None:
        """Whoever waits or sends for this update raises this."""
        self._stop.why = why
        self.wake()

    def wake(self) -> None:
        """Whoever waits looks at once. From any thread."""
        if not self._background.is_closed:
            self._background.loop.call_soon_threadsafe(self._changed.set)

    async def _follow(self, api: ApiServer, asked: Asked) -> None:
        pause_s = AGAIN_S
        path = path_of(API, self._namespace, "weightversions")
        while True:
            try:
                found = await api.get(f"{path}/{asked.name}")
                self._take_in(found, asked)
                self._away, pause_s = "", AGAIN_S
                async for news in api.watch(path, asked.name, found["metadata"]["resourceVersion"]):
                    self._take_in(news, asked)
                await asyncio.sleep(AGAIN_S)  # whoever ends watches as soon as they begin is not asked without end
            except NotFoundError:
                self.stop(NotPossible(f"{asked.place}: WeightVersion {asked.name} was deleted"))
                return
            except DeniedError as error:  # asking again would not help, and the fleet would wait for this sender
                self.stop(DeniedError(f"{asked.place}: it cannot be followed any more: {error}"))
                return
            except ApiServerError as error:
                self._away = f"the API server: {error}"
                logger.warning("%s: %s", asked.place, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_AGAIN_S)

    def _take_in(self, found: Manifest, asked: Asked) -> None:
        if found["metadata"]["uid"] != asked.uid:
            raise NotFoundError(f"{asked.name} was made anew")
        self._weight_version = found
        self._look = judge(found, asked, self._keeper.holder)
        self._changed.set()

    @property
    def _identity(self) -> FleetIdentity:
        return FleetIdentity(namespace=self._namespace, name=self._name, uid=self._engine["metadata"]["uid"])

    @property
    def _keeper(self) -> Keeper:
        if self.keeper is None:
            raise NotPossible("there is no connection yet")
        return self.keeper

    def _required(self) -> Asked:
        if self._asked is None:
            raise NotPossible("no version was asked for yet")
        return self._asked
