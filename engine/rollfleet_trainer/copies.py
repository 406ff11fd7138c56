"""Stored copies of what a fleet serves: named as recovery, and kept as long as anybody reads them.

A push needs no copy, so none is written while a fleet waits: the loop publishes one afterwards, and the version that
the fleet serves gets it as `spec.recovery` if it is the same weights by their digest.
"""

from __future__ import annotations

from rollfleet_trainer import turns
from rollfleet_trainer.apiserver import API, ApiServer, Manifest, path_of
from rollfleet_trainer.errors import ConflictError
from rollfleet_trainer.retention import paths_in_use
from rollfleet_trainer.versions import holds, in_charge, stored


async def name_recovery(api: ApiServer, namespace: str, fleet: str, path: str, digest: str) -> int | None:
    """Name a checkpoint as recovery of the version that the fleet holds, and that version; None where it is another's.

    Only a push has a recovery, and only where its digest is the checkpoint's. The name outlives the next version, which
    may be asked for before the operator has looked: spec.stored keeps it. Raises ApiServerError.
    """
    words = ""
    for turn in range(turns.WRITES):
        await turns.before(turn)
        engine = await api.get(path_of(API, namespace, "rolloutengines", fleet))
        listed = await api.get(path_of(API, namespace, "weightversions"))
        charge = in_charge(listed.get("items") or (), engine)
        if charge is None or not holds(charge) or charge["status"].get("digest") != digest:
            return None
        version = int(charge["spec"]["version"])
        if ((charge["spec"].get("recovery") or {}).get("checkpoint") or {}).get("path") == path:
            return version
        metadata = {name: charge["metadata"][name] for name in ("resourceVersion", "uid")}
        spec = {"recovery": {"checkpoint": {"path": path}}, "stored": stored(version, path)}
        patch: Manifest = {"metadata": metadata, "spec": spec}
        try:
            await api.patch(path_of(API, namespace, "weightversions", charge["metadata"]["name"]), patch)
        except ConflictError as error:
            words = str(error)
            continue
        return version
    raise ConflictError(f"{namespace}/{fleet}: {turns.WRITES} writes in a row were too late: {words}")


async def in_use(api: ApiServer, namespace: str) -> frozenset[str]:
    """Checkpoints that the namespace's fleets speak of. Its claims can be mounted nowhere else.

    All that is in use when the first answer comes is among them: see paths_in_use for why that is the versions'.
    """
    versions = await api.get(path_of(API, namespace, "weightversions"))
    engines = await api.get(path_of(API, namespace, "rolloutengines"))
    return paths_in_use(engines.get("items") or (), versions.get("items") or ())
