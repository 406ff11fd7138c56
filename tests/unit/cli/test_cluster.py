"""What a person is told when the way to the cluster, or the cluster, is not what it should be."""

from pathlib import Path

import pytest

from rollfleet_cli.cluster import Access, Cluster, _checked
from rollfleet_cli.errors import NotFoundError, UnreachableError


@pytest.mark.parametrize("text", ["root:x:0:0:root\n", "a: [1\n", "- 1\n"], ids=["words", "broken", "a list"])
def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(UnreachableError, match=f"no way to a cluster: {file} is not a kubeconfig: ") as told:
        Cluster(Access(file))
    assert "--kubeconfig" in str(told.value)


def test_a_cluster_without_our_kinds_is_not_taken_for_a_missing_fleet() -> None:
    with pytest.raises(UnreachableError, match=r"does not know rolloutengines .*: install the chart"):
        _checked(404, b"404 page not found\n", "rolloutengines")
    with pytest.raises(NotFoundError, match="no such fleet"):
        _checked(404, b'{"kind": "Status", "message": "no such fleet"}', "RolloutEngine rl/qwen")
