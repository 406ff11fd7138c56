"""What an operator's pass does to the world, action by action."""

from rollfleet_operator.core.actions import (
    Action,
    ApplyObject,
    CreatePod,
    DeleteObject,
    DeletePod,
    GuardCall,
    LabelPod,
    StopPod,
)
from tests.model.api_server import ApiServer
from tests.model.following import Following
from tests.model.nodes import Nodes
from tests.model.senders import SenderLease
from tests.model.watching import PodWatch

LEASE = "Lease"


class Hands:
    """Of one term of an operator. `children`: what it has applied, by kind and name."""

    def __init__(self, api: ApiServer, nodes: Nodes, lease: SenderLease, following: Following, watch: PodWatch) -> None:
        self.children: dict[str, str] = {}
        self._api = api
        self._nodes = nodes
        self._lease = lease
        self._following = following
        self._watch = watch

    def act(self, action: Action) -> None:
        """Carry it out."""
        if isinstance(action, GuardCall):
            self._following.give(action.pod_uid, action.command)
        elif isinstance(action, CreatePod):
            self._api.write_pod(lambda: self._nodes.create(action.manifest))
            name = str(action.manifest["metadata"]["name"])
            self._watch.learn(next((uid for uid, view in self._api.pods.items() if view.name == name), ""))
        elif isinstance(action, DeletePod):
            self._api.write_pod(lambda: self._nodes.delete(action.uid))
            self._watch.learn(action.uid)
        elif isinstance(action, StopPod):
            self._api.write_pod(lambda: self._nodes.stop(action.uid, action.why))
            self._watch.learn(action.uid)
        elif isinstance(action, LabelPod):
            self._api.write_pod(lambda: self._api.change_pod(action.uid, serving_label=action.serving))
            self._watch.learn(action.uid)
        elif isinstance(action, ApplyObject):
            self._apply(action)
        elif isinstance(action, DeleteObject):
            if action.kind == LEASE:
                self._api.write_pod(self._lease.remove)
            self.children.pop(f"{action.kind}/{action.name}", None)

    def _apply(self, action: ApplyObject) -> None:
        kind, name = action.manifest["kind"], action.manifest["metadata"]["name"]
        if kind == LEASE:
            self._api.write_pod(lambda: self._lease.make(action.manifest))
        self.children[f"{kind}/{name}"] = action.content_hash
