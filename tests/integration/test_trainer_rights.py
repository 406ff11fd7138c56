"""The trainer's side of the API server under the rights that docs/trainer.md lists, and no others."""

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from examples.demo.environment import ROOT, use_cluster
from examples.demo.kubectl import kubectl
from rollfleet_protocol.engine_config import FleetIdentity
from rollfleet_protocol.senders import OFFERS_ANNOTATION
from rollfleet_trainer.apiserver import API, LEASES_API, ApiServer, path_of
from rollfleet_trainer.background import Background
from rollfleet_trainer.errors import (
    AnotherSender,
    ApiServerError,
    ConflictError,
    DeniedError,
    NotFoundError,
    SenderLost,
)
from rollfleet_trainer.keeper import Keeper
from rollfleet_trainer.tokens import Tokens, account_of_caller

DURATION_S = 15  # a request may take a fifth of it
LONG_S = 30  # for a machine that stands still at times
FLEET, ACCOUNT = "qwen", "grpo"  # as in the docs
SOON_S = 60.0


class Place:
    """A namespace with the Lease that an operator would make, and the ServiceAccount with its rights."""

    def __init__(self, namespace: str, folder: Path) -> None:
        self.namespace = namespace
        self.folder = folder
        self.apis: list[ApiServer] = []

    async def set_up(self) -> None:
        await kubectl("create", "namespace", self.namespace)
        await kubectl("create", "serviceaccount", ACCOUNT, "-n", self.namespace)
        await kubectl("create", "serviceaccount", "ppo", "-n", self.namespace)
        for document in rights_of_the_docs(self.namespace):
            await kubectl("apply", "-f", "-", manifest=document)
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        lease["metadata"] = {"name": f"{FLEET}-sender", "namespace": self.namespace}  # type: ignore[assignment]
        await kubectl("create", "-f", "-", manifest=lease)

    async def trainer(self) -> ApiServer:
        """A connection as the ServiceAccount."""
        view = json.loads(await kubectl("config", "view", "--raw", "--minify", "-o", "json"))
        token = await kubectl("create", "token", ACCOUNT, "-n", self.namespace, "--duration", "1h")
        view["users"] = [{"name": view["users"][0]["name"], "user": {"token": token.strip()}}]
        path = self.folder / "trainer.kubeconfig"
        path.write_text(json.dumps(view), encoding="utf-8")
        api = await ApiServer.connect(path)
        self.apis.append(api)
        return api

    async def keeper(self, name: str, api: ApiServer | None = None, duration_s: int = LONG_S) -> Keeper:
        """One process of the account."""
        return Keeper(api or await self.trainer(), self.namespace, FLEET, f"{ACCOUNT}/{name}", duration_s)

    async def lease(self) -> dict[str, Any]:
        """As everybody sees it."""
        return json.loads(await kubectl("get", "lease", f"{FLEET}-sender", "-n", self.namespace, "-o", "json"))

    async def tear_down(self) -> None:
        for api in self.apis:
            await api.close()
        await kubectl("delete", "namespace", self.namespace, "--wait=false")


def rights_of_the_docs(namespace: str) -> list[dict[str, Any]]:
    """Role and RoleBinding as the page gives them."""
    page = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert block is not None
    documents = list(yaml.safe_load_all(block[1]))
    for document in documents:
        document["metadata"]["namespace"] = namespace
        for subject in document.get("subjects", ()):
            subject["namespace"] = namespace
    return documents


@pytest_asyncio.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    use_cluster()
    made = Place(f"it-{secrets.token_hex(4)}", tmp_path)
    await made.set_up()
    try:
        yield made
    finally:
        await made.tear_down()


async def test_the_lease_is_held_offered_refused_and_given_back(place: Place) -> None:
    api = await place.trainer()
    one, two = await place.keeper("a", api), await place.keeper("b", api)
    await one.take(0)
    await one.offer("uid-1/7")
    lease = await place.lease()
    assert lease["spec"]["holderIdentity"] == f"{ACCOUNT}/a"
    assert lease["metadata"]["annotations"][OFFERS_ANNOTATION] == "uid-1/7"
    began = time.monotonic()
    with pytest.raises(AnotherSender, match="grpo/a"):
        await two.take(0)
    assert time.monotonic() - began < LONG_S
    await asyncio.wait_for(two_after(one, two), SOON_S)
    assert two.holds()
    assert (await place.lease())["spec"]["holderIdentity"] == f"{ACCOUNT}/b"
    await two.release()
    assert not (await place.lease())["spec"].get("holderIdentity")


async def two_after(one: Keeper, two: Keeper) -> None:
    """One gives it back; two takes it."""
    await one.release()
    await two.take(0)


async def test_a_trainer_that_died_is_followed_once_its_lease_has_run_out(place: Place) -> None:
    api = await place.trainer()
    one, two = await place.keeper("a", api, DURATION_S), await place.keeper("b", api, DURATION_S)
    await one.take(0)
    await one._stop_renewing()  # it was killed
    began = time.monotonic()
    await asyncio.wait_for(two.take(0), SOON_S)
    assert time.monotonic() - began >= DURATION_S
    assert not one.holds()
    assert (await place.lease())["spec"]["leaseTransitions"] == 1
    await two.release()


async def test_a_right_that_is_withdrawn_ends_the_hold_with_the_api_server_s_words(place: Place) -> None:
    one = await place.keeper("a")
    await one.take(0)
    await kubectl("delete", "rolebinding", "qwen-trainer", "-n", place.namespace)
    with pytest.raises(SenderLost, match="forbidden"):
        await offer_again_and_again(one)
    assert not one.holds()
    await one.release()


async def offer_again_and_again(one: Keeper) -> None:
    """What authorizes hears of a change within a moment."""
    while True:
        await one.offer("uid-1/7")


async def test_tokens_are_of_the_account_and_for_one_engine(place: Place) -> None:
    api, background = await place.trainer(), Background("test")
    try:
        assert await account_of_caller(api, place.namespace, (ACCOUNT, "ppo")) == ACCOUNT
        audience = FleetIdentity(namespace=place.namespace, name=FLEET, uid="f1").audience("pod-1")
        await Tokens(api, background, (place.namespace, ACCOUNT)).prepare([audience])
        tokens = Tokens(api, background, (place.namespace, ACCOUNT))
        token = await tokens._minted(audience)
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
        for asked, good in ((audience, True), (audience + "-other", False)):
            manifest = review | {"spec": {"token": token, "audiences": [asked]}}
            told = json.loads(await kubectl("create", "-f", "-", "-o", "json", manifest=manifest))
            assert bool(told["status"].get("authenticated")) is good
        with pytest.raises(DeniedError, match=r"docs/trainer\.md"):
            await Tokens(api, background, (place.namespace, "ppo"))._minted(audience)
    finally:
        background.close()


async def test_a_misspelt_field_is_refused_by_its_name(place: Place) -> None:
    api = await place.trainer()
    versions = path_of(API, place.namespace, "weightversions")
    spec = {"engineRef": {"name": FLEET}, "version": 1, "source": {"type": "Trainer", "trainer": {}}}
    policy = {"apiVersion": "rollfleet.io/v1alpha1", "kind": "WeightVersion", "metadata": {"name": "qwen-policy"}}
    with pytest.raises(ApiServerError, match=r'strict decoding error: unknown field "spec.verfy" .*docs/api.md'):
        await api.create(versions, {**policy, "spec": {**spec, "verfy": {}}})
    await api.create(versions, {**policy, "spec": spec})
    with pytest.raises(
        ApiServerError, match=r'weightversions/qwen-policy: strict .* field "spec.deadlines.transferSecs"'
    ):
        await api.patch(f"{versions}/qwen-policy", {"spec": {"deadlines": {"transferSecs": 1}}})


async def test_an_object_is_followed_from_what_was_read_to_its_end(place: Place) -> None:
    api = await place.trainer()
    path = path_of(API, place.namespace, "weightversions")
    spec = {
        "engineRef": {"name": FLEET},
        "version": 1,
        "source": {"type": "Checkpoint", "checkpoint": {"path": "step-1"}},
    }
    body = {"apiVersion": "rollfleet.io/v1alpha1", "kind": "WeightVersion", "metadata": {"name": "qwen-policy"}}
    await api.require_watch(path, "qwen-policy")
    with pytest.raises(DeniedError, match="watch"):
        await api.require_watch(path_of(LEASES_API, place.namespace, "leases"), f"{FLEET}-sender")
    made = await api.create(path, body | {"spec": spec})
    news = api.watch(path, "qwen-policy", made["metadata"]["resourceVersion"])
    coming = asyncio.create_task(step_of(news, "100"))
    await api.patch(f"{path}/qwen-policy", {"spec": {"step": "100"}})
    await asyncio.wait_for(coming, SOON_S)
    stale = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "spec": {"step": "200"}}
    with pytest.raises(ConflictError):
        await api.patch(f"{path}/qwen-policy", stale)
    await kubectl("delete", "weightversion", "qwen-policy", "-n", place.namespace)
    with pytest.raises(NotFoundError):
        await asyncio.wait_for(drained(news), SOON_S)
    with pytest.raises(DeniedError):
        await api.get(path_of("/api/v1", place.namespace, "secrets"))
    with pytest.raises(DeniedError):
        await api.get(path_of(LEASES_API, place.namespace, "leases", "another-sender"))


async def step_of(news: AsyncIterator[dict[str, Any]], step: str) -> None:
    """Until it is seen; an operator of others may write its own words in between."""
    async for each in news:
        if each["spec"].get("step") == step:
            return


async def drained(news: AsyncIterator[dict[str, Any]]) -> None:
    async for _ in news:
        pass
