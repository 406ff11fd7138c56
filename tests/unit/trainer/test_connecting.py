"""Which API server a trainer speaks to, and as whom: a kubeconfig that is named, else, in a pod, its ServiceAccount."""

from pathlib import Path

import pytest
import yaml
from kubernetes.aio.config import incluster_config

from rollfleet_trainer.apiserver import ApiServer
from rollfleet_trainer.errors import NotPossible
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
def kubeconfig(tmp_path: Path) -> Path:
    one = {
        "clusters": [{"name": "one", "cluster": {"server": "https://api.example:6443"}}],
        "users": [{"name": "me", "user": {"token": "mine"}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "me"}}],
        "current-context": "one",
    }
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


async def test_elsewhere_it_is_the_kubeconfig_that_is_named(
    kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert (await reached(kubeconfig))[1] == "Bearer mine"
    with pytest.raises(NotPossible, match=r"no way to the API server by kubeconfig .*nowhere"):
        await ApiServer.connect(tmp_path / "nowhere")
