"""Cache keys, versions, image names and what a build sees of the machine."""

import io
import shutil
import zipfile
from pathlib import Path

import pytest

from devcluster import binaries, images, prerequisites, toolchain
from devcluster.errors import InvalidInputError
from devcluster.paths import GO_SOURCE


@pytest.mark.parametrize("binary", binaries.BINARIES, ids=lambda binary: binary.name)
def test_every_program_is_pinned_by_a_go_mod(binary: binaries.Binary) -> None:
    go_mod = (GO_SOURCE / binary.module / "go.mod").read_text()
    assert (GO_SOURCE / binary.module / "go.sum").stat().st_size > 0
    assert f"\t{binary.package}\n" in go_mod or f"tool {binary.package}\n" in go_mod or binary.package.startswith(".")


def test_kubernetes_reports_the_version_that_is_pinned() -> None:
    go_mod = (GO_SOURCE / "controlplane" / "go.mod").read_text()
    version = binaries.required_version(go_mod, "k8s.io/kubernetes")
    flags = binaries.link_flags(go_mod, "k8s.io/kubernetes")
    assert f"-X k8s.io/component-base/version.gitVersion={version}" in flags
    assert f"-X k8s.io/component-base/version.gitMinor={version.split('.')[1]}" in flags


def test_crds_are_judged_by_the_code_of_the_cluster_and_the_chart() -> None:
    """The API server that the tests run, and the oldest Kubernetes that the chart takes."""
    go_mod = (GO_SOURCE / "crdcheck" / "go.mod").read_text()
    kubernetes = binaries.required_version((GO_SOURCE / "controlplane" / "go.mod").read_text(), "k8s.io/kubernetes")
    published = f"v0.{kubernetes.removeprefix('v1.')}"
    for module in ("k8s.io/apiextensions-apiserver", "k8s.io/apimachinery", "k8s.io/apiserver"):
        assert binaries.required_version(go_mod, module) == published
    chart = (GO_SOURCE.parents[1] / "charts" / "rollfleet" / "Chart.yaml").read_text()
    oldest = chart.partition('kubeVersion: ">=')[2].split(".")[:2]
    assert f"MajorMinor({', '.join(oldest)})" in (GO_SOURCE / "crdcheck" / "costs.go").read_text()


def test_a_version_that_is_not_required_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match=r"requires no k8s\.io/absent"):
        binaries.required_version("module a\n", "k8s.io/absent")


def test_the_cache_key_changes_with_each_input(tmp_path: Path) -> None:
    module = tmp_path / "controlplane"
    shutil.copytree(GO_SOURCE / "controlplane", module)
    keys = {binaries.cache_key(module, "1.26.8")}
    assert binaries.cache_key(module, "1.26.8") in keys
    keys.add(binaries.cache_key(module, "1.27.0"))
    for name in ("go.mod", "go.sum", "cmd/pause/main.go"):
        with (module / name).open("a") as file:
            file.write("// changed\n")
        keys.add(binaries.cache_key(module, "1.26.8"))
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("text", "version"),
    [("go version go1.26.8 linux/amd64", (1, 26)), ("go version go1.19 linux/arm64", (1, 19)), ("gibberish", (0, 0))],
)
def test_the_compilers_version_is_read(text: str, version: tuple[int, int]) -> None:
    assert toolchain.parse_version(text) == version


@pytest.mark.parametrize(
    ("value", "proxies"),
    [
        ("", []),
        ("https://one.example/x/,direct", ["https://one.example/x"]),
        ("http://one.example|https://two.example,off", ["http://one.example", "https://two.example"]),
        ("direct", []),
    ],
)
def test_module_proxies_are_those_of_goproxy(value: str, proxies: list[str]) -> None:
    assert toolchain.proxies({"GOPROXY": value}) == proxies


def test_a_modules_hash_is_gos_own() -> None:
    """The answer for this archive is that of golang.org/x/mod/sumdb/dirhash, HashZip with Hash1."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("example.com/a@v1.0.0/go.mod", "module example.com/a\n")
        archive.writestr("example.com/a@v1.0.0/a.go", "package a\n")
    with zipfile.ZipFile(buffer) as archive:
        assert toolchain.module_hash(archive) == "h1:WKGCEXVonIBzf8Rfxa1txNoZf8hXmk6l0CpNI8zjCG0="


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("engine", "docker.io/library/engine:latest"),
        ("engine:dev", "docker.io/library/engine:dev"),
        ("team/engine:dev", "docker.io/team/engine:dev"),
        ("localhost/engine:dev", "localhost/engine:dev"),
        ("registry.example:5000/a/b", "registry.example:5000/a/b:latest"),
    ],
)
def test_image_names_are_completed_as_the_kubelet_does(tag: str, name: str) -> None:
    assert images.full_name(tag) == name


@pytest.mark.parametrize("tag", ["", "Upper:1", "a b", "a:b:c", "a:"])
def test_what_is_no_image_name_is_refused(tag: str) -> None:
    with pytest.raises(InvalidInputError, match="not an image name"):
        images.full_name(tag)


def test_archives_of_one_name_differ_by_the_image_only() -> None:
    first, second = images.archive_name("engine:dev", "a" * 64), images.archive_name("engine:dev", "b" * 64)
    assert first != second
    assert first.partition("@")[0] == second.partition("@")[0]


def test_pips_environment_outranks_its_files() -> None:
    files = ["[global]\ncert = /a\nindex-url = https://one.example\n", "[install]\nindex-url = https://two.example\n"]
    options = images.pip_options(files, {"PIP_INDEX_URL": "https://three.example", "PIP_CERT": "/b", "HOME": "/h"})
    assert options == {"cert": "/a", "index-url": "https://three.example"}


def test_a_build_sees_the_machines_files_at_places_of_its_own() -> None:
    options = {"find-links": "/srv/wheels https://links.example", "cert": "/somewhere/ca.crt", "timeout": "60"}
    text = images.pip_config(options, certificates=True)
    assert "/srv" not in text
    assert "/somewhere" not in text
    assert "cert = /run/devcluster/ca-certificates.crt" in text
    assert "find-links = /run/devcluster/wheels-0\n    https://links.example" in text
    assert images.wheel_folders(options) == {"/srv/wheels": "/run/devcluster/wheels-0"}


def test_pip_reads_back_the_settings_that_were_written() -> None:
    options = {"index-url": "https://one.example/%simple", "find-links": "/a\n/b"}
    again = images.pip_options([images.pip_config(options, certificates=False)], {})
    assert again["index-url"] == "https://one.example/%simple"
    assert again["find-links"].split() == ["/run/devcluster/wheels-0", "/run/devcluster/wheels-1"]


def test_the_build_command_carries_arguments_and_volumes() -> None:
    build = images.Build(Path("/c/Dockerfile"), "engine:dev", Path("/c"), ("BASE=b", "X=1"), ("/h:/in:ro",))
    command = images.build_command(build, Path("/id"), ["/pip:/etc/pip.conf:ro"])
    assert command[-1] == "/c"
    assert command[command.index("--tag") + 1] == "docker.io/library/engine:dev"
    assert [command[i + 1] for i, word in enumerate(command) if word == "--build-arg"] == ["BASE=b", "X=1"]
    volumes = [command[i + 1] for i, word in enumerate(command) if word == "--volume"]
    assert volumes == ["/pip:/etc/pip.conf:ro", "/h:/in:ro"]
    assert command[command.index("--isolation") + 1] == "chroot"


@pytest.mark.parametrize(
    ("listed", "stale"),
    [
        ("null", False),
        ('[{"names": ["docker.io/library/a:1"], "created": 0}]', False),
        ('[{"names": null, "created": 999000}]', False),
        ('[{"names": ["docker.io/library/a:1"], "created": 0}, {"names": null, "created": 1000}]', True),
    ],
)
def test_only_old_layers_without_a_name_are_stale(listed: str, stale: bool) -> None:
    assert images.has_stale_layers(listed, now=1_000_000.0) is stale


def test_os_release_is_read_with_and_without_quotes() -> None:
    text = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n# comment=1\nID=debian\nVERSION_CODENAME=bookworm\n'
    release = prerequisites.os_release(text)
    assert release == {"PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)", "ID": "debian", "VERSION_CODENAME": "bookworm"}


def test_each_missing_package_is_named_once() -> None:
    needed = {"no-such-program": "b", "/no/such/file": "a", "no-such-other": "b", "sh": "dash"}
    assert prerequisites.missing_packages(needed) == ["a", "b"]
