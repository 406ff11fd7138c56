"""Which API server a trainer speaks to, and as whom: a kubeconfig that is named, else, in a pod, its ServiceAccount."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from kubernetes.aio.config import incluster_config

from rollfleet_trainer.apiserver import ApiServer, refusal
from rollfleet_trainer.errors import ApiServerError, DeniedError, NotPossible, UnauthorizedError
from rollfleet_trainer.session import Resolver, environments_proxy
from tests.support.certificates import write_certificate

VARIABLES = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}


async def reached(kubeconfig: Path | None) -> tuple[str, str]:
    """The URL and the identity of a request, which is not sent."""
    api = await ApiServer.connect(kubeconfig)
    try:
        _, url, headers, _, _ = await api._api.param_serialize(
            "GET", "/version", header_params={}, auth_settings=["BearerToken"]
        )
        return url, {name.lower(): value for name, value in headers.items()}["authorization"]
    finally:
        await api.close()


@pytest.fixture
def one() -> dict[str, Any]:
    return {
        "clusters": [{"name": "one", "cluster": {"server": "https://api.example:6443"}}],
        "users": [{"name": "me", "user": {"token": "mine"}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "me"}}],
        "current-context": "one",
    }


@pytest.fixture
def kubeconfig(one: dict[str, Any], tmp_path: Path) -> Path:
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(one))
    return file


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a kubelet gives a pod; the folder of its account."""
    write_certificate(tmp_path, "kubernetes.default.svc")
    (tmp_path / "token").write_text("the-pod-s")
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "tls.crt"))
    return tmp_path


async def test_in_a_pod_it_is_the_pod_s_account(pod: Path, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    assert await reached(None) == ("https://[fd00::1]:443/version", "bearer the-pod-s")
    assert await reached(kubeconfig) == ("https://api.example:6443/version", "Bearer mine"), "it was named"
    (pod / "token").unlink()
    with pytest.raises(NotPossible, match=r"no way to the API server by the pod's ServiceAccount: .*token file"):
        await ApiServer.connect(None)


class Server:
    """An API server that answers every request alike."""

    def __init__(self, status: int, message: str) -> None:
        self.asked: list[tuple[str, str]] = []
        self._answer = (status, {"kind": "Status", "message": message})

    async def __call__(self, request: web.BaseRequest) -> web.Response:
        self.asked.append((request.method, request.query_string))
        status, body = self._answer
        return web.json_response(body, status=status)


def move(kubeconfig: Path, server: str) -> None:
    document = yaml.safe_load(kubeconfig.read_text())
    document["clusters"][0]["cluster"]["server"] = server
    kubeconfig.write_text(yaml.safe_dump(document))


@asynccontextmanager
async def connected(server: Server, kubeconfig: Path) -> AsyncIterator[ApiServer]:
    runner = web.ServerRunner(web.Server(server))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        move(kubeconfig, "http://{}:{}".format(*runner.addresses[0][:2]))
        api = await ApiServer.connect(kubeconfig)
        try:
            yield api
        finally:
            await api.close()
    finally:
        await runner.cleanup()


async def test_what_is_written_is_judged_strictly_and_what_is_read_is_not(kubeconfig: Path):
    server = Server(200, "")
    async with connected(server, kubeconfig) as api:
        await api.get("/apis/a")
        await api.create("/apis/a", {})
        await api.patch("/apis/a", {})
    assert server.asked == [("GET", ""), ("POST", "fieldValidation=Strict"), ("PATCH", "fieldValidation=Strict")]


@pytest.mark.parametrize(
    ("status", "before"),
    [
        (400, 'WeightVersion in version "v1alpha1" cannot be handled as a WeightVersion: '),
        # Of a patch the whole object stands before it (k8s.io/apiserver, pkg/endpoints/handlers/patch.go).
        (422, ' "" is invalid: patch: Invalid value: "' + 9000 * "{" + '": '),
    ],
)
async def test_a_misspelt_field_is_named(kubeconfig: Path, status: int, before: str):
    words = 'strict decoding error: unknown field "spec.verfy"'
    async with connected(Server(status, before + words), kubeconfig) as api:
        with pytest.raises(ApiServerError) as raised:
            await api.patch("/apis/a", {})
    assert str(raised.value).startswith(f"PATCH /apis/a: {words} (HTTP {status}). docs/api.md lists")


async def test_elsewhere_it_is_the_kubeconfig_that_is_named(
    kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert (await reached(kubeconfig))[1] == "Bearer mine"
    with pytest.raises(NotPossible, match=r"no way to the API server by kubeconfig .*nowhere: there is no such file$"):
        await ApiServer.connect(tmp_path / "nowhere")


async def test_of_the_files_of_the_environment_one_must_be_there(
    kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'nowhere'}:{kubeconfig}")
    assert (await reached(None))[1] == "Bearer mine"
    cure = r"there is no such file; this is no pod: give kubeconfig=, or set \$KUBECONFIG"
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(NotPossible, match=rf"by kubeconfig \$KUBECONFIG, .*nowhere: {cure}"):
        await ApiServer.connect(None)
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NotPossible, match=rf"by kubeconfig ~/\.kube/config: {cure}"):
        await ApiServer.connect(None)


def test_a_token_that_is_not_accepted_is_no_matter_of_rights():
    told = refusal(401, b'{"kind": "Status", "message": "Unauthorized"}', "GET /x")
    assert isinstance(told, UnauthorizedError)
    assert str(told).startswith("GET /x: Unauthorized (HTTP 401). The API server does not accept this token")
    assert "rights" not in str(told)
    told = refusal(403, b'{"message": "grpo cannot get it"}', "GET /x")
    assert type(told) is DeniedError
    assert "docs/trainer.md lists the rights" in str(told)


async def test_names_that_are_known_need_no_executor_any_more():
    """concurrent.futures refuses everything while the interpreter shuts down; the Lease is given back then."""
    resolver, executor = Resolver(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    found = await resolver.resolve("localhost", 6443)
    executor.shutdown()
    assert await resolver.resolve("localhost", 6443) == found
    with pytest.raises(RuntimeError, match="after shutdown"):
        await resolver.resolve("localhost", 6444)


def test_the_environment_s_proxies_are_as_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "api.cluster.example,.local")
    assert environments_proxy("https://api.example:6443") == "http://proxy.example:3128"
    assert environments_proxy("https://api.cluster.example:6443") is None
    assert environments_proxy("https://one.local") is None
    assert environments_proxy("http://api.example:6443") is None


@pytest.mark.parametrize("named", ["http://other.example:3128", None])
async def test_requests_go_by_the_proxy_of_the_kubeconfig_else_of_the_environment(
    named: str | None, one: dict[str, Any], kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    if named:
        one["clusters"][0]["cluster"]["proxy-url"] = named
        await asyncio.to_thread(kubeconfig.write_text, yaml.safe_dump(one))
    api = await ApiServer.connect(kubeconfig)
    assert api._api.rest_client.proxy == (named or "http://proxy.example:3128")
    await api.close()
