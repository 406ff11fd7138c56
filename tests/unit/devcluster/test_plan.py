"""Addresses, paths, certificates and the components' arguments: pure data."""

import json
import tempfile
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from devcluster import components, configs, pki
from devcluster.bootstrap import objects
from devcluster.errors import InvalidInputError
from devcluster.network import MAX_PODS, AddressPlan
from devcluster.paths import LONGEST_HOME, Paths, from_environment

PLAN = AddressPlan()
PATHS = Paths(home=Path("/var/lib/some-home"), cache=Path("/var/cache/some-cache"))


def test_the_default_plan_stays_in_the_range_for_tests() -> None:
    reserved = IPv4Network("198.18.0.0/15")  # RFC 2544
    assert PLAN.pods.subnet_of(reserved)
    assert PLAN.services.subnet_of(reserved)
    assert PLAN.dns_service in PLAN.services
    assert PLAN.kubernetes_service == IPv4Address("198.19.0.1")
    assert PLAN.gateway == IPv4Address("198.18.0.1")
    assert int(PLAN.pods.broadcast_address) - int(PLAN.first_pod) >= MAX_PODS


@pytest.mark.parametrize(
    ("pods", "services", "said"),
    [
        ("10.0.0.0/16", "10.0.4.0/24", "overlap"),
        ("10.0.0.0/24", "10.1.0.0/24", "no room for 250 pods"),
        ("10.0.0.0/16", "10.1.0.0/30", "no room for the DNS service"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(pods: str, services: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        AddressPlan(pods=IPv4Network(pods), services=IPv4Network(services))


@pytest.mark.parametrize(
    ("environment", "home", "cache"),
    [
        ({"HOME": "/h"}, "/h/.local/state/rollfleet/devcluster", "/h/.cache/rollfleet/devcluster"),
        (
            {"HOME": "/h", "XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/s"},
            "/s/rollfleet/devcluster",
            "/c/rollfleet/devcluster",
        ),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/c", "DEVCLUSTER_HOME": "/x", "DEVCLUSTER_CACHE": "/y"}, "/x", "/y"),
    ],
)
def test_folders_follow_the_environment(environment: dict[str, str], home: str, cache: str) -> None:
    assert from_environment(environment) == Paths(home=Path(home), cache=Path(cache))


def test_a_home_behind_a_link_is_told_by_its_real_path() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # pytest's own folders may be longer than a home may be
        folder = Path(short).resolve()
        (folder / "real").mkdir()
        (folder / "link").symlink_to("real")
        paths = from_environment({"DEVCLUSTER_HOME": f"{folder}/link/home", "DEVCLUSTER_CACHE": "/c"})
        assert paths.home == folder / "real" / "home"


@pytest.mark.parametrize("home", ["relative/path", "/" + "x" * LONGEST_HOME])
def test_a_home_whose_sockets_could_not_be_made_is_refused(home: str) -> None:
    with pytest.raises(InvalidInputError):
        from_environment({"DEVCLUSTER_HOME": home})


def test_every_component_waits_only_for_earlier_ones() -> None:
    seen: set[str] = set()
    for component in components.components(PLAN, PATHS, Path("/bin")):
        assert set(component.after) <= seen
        seen.add(component.name)
    assert len(seen) == 9


def test_components_survive_the_way_through_the_plan_file() -> None:
    for component in components.components(PLAN, PATHS, Path("/bin")):
        assert components.Component.from_json(json.loads(json.dumps(component.to_json()))) == component


def test_what_may_be_killed_is_restarted_and_what_holds_the_data_is_not() -> None:
    restarted = {c.name for c in components.components(PLAN, PATHS, Path("/bin")) if c.restart}
    assert restarted == {"device-plugin", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet"}


def test_the_api_server_is_reached_by_its_bridge_address_only() -> None:
    argv = {c.name: c.argv for c in components.components(PLAN, PATHS, Path("/bin"))}["kube-apiserver"]
    assert "--bind-address=198.18.0.1" in argv
    assert "--authorization-mode=Node,RBAC" in argv


def test_the_certificates_are_the_users_that_kubernetes_expects() -> None:
    subjects = {leaf.name: leaf.subject for leaf in pki.certificates(PLAN)}
    assert subjects["kubelet"] == "/O=system:nodes/CN=system:node:node-0"
    assert subjects["admin"] == "/O=system:masters/CN=admin"
    assert subjects["scheduler"] == "/CN=system:kube-scheduler"
    assert set(components.KUBECONFIGS) <= subjects.keys()


def test_the_api_server_is_known_by_every_name_that_clients_use() -> None:
    (api,) = [leaf for leaf in pki.certificates(PLAN) if leaf.name == "apiserver"]
    assert {"DNS:kubernetes.default.svc", "IP:198.19.0.1", "IP:198.18.0.1"} <= set(api.names)
    command = pki.leaf_command(Path("/pki"), api)
    assert f"subjectAltName={','.join(api.names)}" in command
    assert "extendedKeyUsage=serverAuth,clientAuth" in command


def test_a_certificate_without_names_serves_nobody() -> None:
    (proxy,) = [leaf for leaf in pki.certificates(PLAN) if leaf.name == "proxy"]
    command = pki.leaf_command(Path("/pki"), proxy)
    assert "extendedKeyUsage=clientAuth" in command
    assert not any(word.startswith("subjectAltName") for word in command)


def test_a_kubeconfig_carries_the_authority_and_skips_no_check() -> None:
    document = json.loads(pki.kubeconfig("https://a:1", b"authority", b"certificate", b"key"))
    (cluster,) = document["clusters"]
    assert cluster["cluster"] == {"server": "https://a:1", "certificate-authority-data": "YXV0aG9yaXR5"}


def test_the_kubelet_lets_nobody_in_unasked() -> None:
    kubelet = configs.kubelet(PLAN, PATHS)
    assert kubelet["authentication"]["anonymous"] == {"enabled": False}
    assert kubelet["authorization"] == {"mode": "Webhook"}
    assert kubelet["clusterDNS"] == ["198.19.0.10"]
    assert kubelet["maxPods"] == 250


def test_all_that_containerd_mounts_lies_below_the_home() -> None:
    text = configs.containerd(PATHS)
    assert "netns_mounts_under_state_dir = true" in text
    folders = [
        line.split('"')[1] for line in text.splitlines() if line.split(" =")[0].strip() in {"root", "state", "Root"}
    ]
    assert len(folders) == 3
    assert all(folder.startswith("/var/lib/some-home/") for folder in folders)


def test_pods_get_addresses_above_the_reserved_ones() -> None:
    (bridge,) = configs.cni(PLAN, PATHS)["plugins"]
    assert bridge["ipam"]["ranges"] == [[{"subnet": "198.18.0.0/23", "rangeStart": "198.18.0.16"}]]
    assert bridge["hairpinMode"] is True


def test_names_outside_are_asked_of_the_machine_only_if_it_knows_a_resolver() -> None:
    assert "forward ." in configs.corefile(PLAN, PATHS, forward=True)
    assert "forward" not in configs.corefile(PLAN, PATHS, forward=False)


def test_the_dns_service_leads_to_the_bridge() -> None:
    by_kind = {item["kind"]: item for item in objects(PLAN)}
    assert by_kind["Service"]["spec"]["clusterIP"] == "198.19.0.10"
    assert by_kind["EndpointSlice"]["endpoints"][0]["addresses"] == ["198.18.0.1"]
    labels = by_kind["EndpointSlice"]["metadata"]["labels"]
    assert labels["kubernetes.io/service-name"] == by_kind["Service"]["metadata"]["name"]
