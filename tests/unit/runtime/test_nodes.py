"""Nodes: what they say, read only when asked for and not too often."""

from datetime import UTC, datetime
from typing import Any

import pytest

from rollfleet_operator.clients.errors import Rejected
from rollfleet_operator.clients.podviews import node_view
from rollfleet_operator.core.observed import NodeView
from rollfleet_operator.ports import NODES, Manifest, Resource
from rollfleet_operator.runtime.nodes import FRESH_S, Nodes
from tests.support.cluster import MemoryCluster

HEARD = "2026-11-29T12:05:00Z"
SINCE = "2026-11-29T12:00:00Z"
LATER = datetime(2026, 11, 29, 12, 5, tzinfo=UTC)
THEN = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
TAINT = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}


def make_node(status: str = "True", taints: list[dict[str, Any]] | None = None) -> Manifest:
    ready = {"type": "Ready", "status": status, "lastTransitionTime": SINCE, "lastHeartbeatTime": HEARD}
    return {"metadata": {"name": "node-1"}, "spec": {"taints": taints or []}, "status": {"conditions": [ready]}}


class Counting(MemoryCluster):
    """Counts reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.refuses = False

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest:
        self.reads += 1
        if self.refuses:
            raise Rejected("nodes is forbidden")
        return await super().get(resource, namespace, name)


@pytest.mark.parametrize(
    ("node", "view"),
    [
        (make_node(), NodeView("node-1", ready_since=THEN, heard=LATER)),
        (make_node("Unknown"), NodeView("node-1")),
        (make_node("False", [TAINT]), NodeView("node-1", out_of_service=True)),
        ({"metadata": {"name": "node-1"}}, NodeView("node-1")),
    ],
    ids=["ready", "cut off", "off", "just made"],
)
def test_what_a_node_says(node: Manifest, view: NodeView) -> None:
    assert node_view(node) == view


async def test_each_is_read_once_while_its_answer_is_fresh() -> None:
    cluster, now = Counting(), 0.0
    cluster.put(NODES, "", make_node())
    nodes = Nodes(cluster, lambda: now)
    for _ in range(3):
        assert await nodes.look(["node-1", "node-1"]) == {"node-1": NodeView("node-1", ready_since=THEN, heard=LATER)}
    assert cluster.reads == 1
    now = FRESH_S
    cluster.put(NODES, "", make_node(taints=[TAINT]))
    assert (await nodes.look(["node-1"]))["node-1"].out_of_service
    assert await nodes.look([]) == {}


async def test_one_that_does_not_exist_is_said_to_and_one_that_cannot_be_read_is_left_out() -> None:
    cluster = Counting()
    assert await Nodes(cluster).look(["node-1"]) == {"node-1": NodeView("node-1", exists=False)}
    cluster.refuses = True
    assert await Nodes(cluster).look(["node-1"]) == {}
