"""Children other than pods: applied where their content differs from what was applied last."""

from rollfleet_operator.api.rolloutengine import RouterMode
from rollfleet_operator.core.actions import ApplyObject, DeleteObject
from rollfleet_operator.core.objects.common import Manifest, apply_object, key_of
from rollfleet_operator.core.objects.network_policy import build_network_policy
from rollfleet_operator.core.objects.router import build_router
from rollfleet_operator.core.objects.sender import build_sender_lease
from rollfleet_operator.core.objects.services import build_client, build_headless
from rollfleet_operator.core.observed import Observed


def plan_children(observed: Observed) -> tuple[ApplyObject | DeleteObject, ...]:
    """Applies and deletes of this pass."""
    fleet = observed.fleet
    router = build_router(fleet, observed.settings)
    policy = build_network_policy(fleet, observed.settings)
    wanted: tuple[Manifest, ...] = (build_headless(fleet), build_client(fleet))
    unwanted: tuple[Manifest, ...] = router[::-1]
    if fleet.spec.router.mode is RouterMode.ENABLED:
        wanted, unwanted = (*wanted, *router), ()
    lease = build_sender_lease(fleet)
    if fleet.spec.trainers:
        wanted = (*wanted, lease)
    else:
        unwanted = (*unwanted, lease)
    if observed.settings.operator_pods:
        wanted = (*wanted, policy)
    else:
        unwanted = (*unwanted, policy)
    applies = [apply_object(manifest) for manifest in wanted]
    deletes = [
        DeleteObject(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])
        for manifest in unwanted
        if key_of(manifest) in observed.children
    ]
    changed = [apply for apply in applies if observed.children.get(key_of(apply.manifest)) != apply.content_hash]
    return (*changed, *deletes)
