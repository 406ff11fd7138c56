"""A trainer is a pod of the fleet's namespace: the Job of examples/training, as its README starts it.

Nothing is given to it but its ServiceAccount: API server, token and endpoint are found as in any pod.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import yaml

from devtools import trainer_packages
from examples.demo.environment import Environment
from examples.demo.fleet import Fleet, condition
from examples.demo.kubectl import apply, get, kubectl, until
from tests.e2e.test_training import committed, require_whole
from tests.e2e.training import EXAMPLE, create

VERSIONS = 3
END_S = 400.0


def job(fleet: Fleet, environment: Environment, checkpoints: Path, packages: Path) -> dict[str, Any]:
    """The example's, with what is this machine's: an image whose torch is mounted, folders in place of claims."""
    manifest: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text(encoding="utf-8"))
    manifest["metadata"]["namespace"] = fleet.namespace
    spec = manifest["spec"]["template"]["spec"]
    container, kind = spec["containers"][0], environment.real()
    container |= {"image": kind.image, "imagePullPolicy": "IfNotPresent"}
    container["args"] += [f"--versions={VERSIONS}", f"--checkpoint-every={VERSIONS}", "--hold=300"]
    container["env"] += [
        {"name": "PATH", "value": f"{environment.venv}/bin:/usr/local/bin:/usr/bin:/bin"},
        {"name": "PYTHONPATH", "value": f"/opt/rollfleet/site:{packages}"},
        {"name": "OMP_NUM_THREADS", "value": "1"},
    ]
    folders = {"models": environment.models.real, "checkpoints": checkpoints}
    for volume in spec["volumes"]:
        if volume["name"] in folders:
            del volume["persistentVolumeClaim"]
            volume["hostPath"] = {"path": str(folders[volume["name"]])}
    for name, path in (("venv", environment.venv), ("packages", packages)):
        spec["volumes"].append({"name": name, "hostPath": {"path": str(path)}})
        container["volumeMounts"].append({"name": name, "mountPath": str(path), "readOnly": True})
    return manifest


async def test_the_job_trains_the_fleet_it_stands_beside(environment: Environment, fleet: Fleet, tmp_path: Path):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for folder in (tmp_path, checkpoints):
        folder.chmod(0o755)
    packages = await asyncio.to_thread(trainer_packages.ensure)
    await create(fleet, environment, checkpoints, environment.models.real, "float32")
    await fleet.serving(2)
    await fleet.url()
    here = ("-n", fleet.namespace)
    files = [f"--from-file={EXAMPLE / name}" for name in ("train.py", "objective.py")]
    await kubectl("create", "configmap", "training-loop", *here, *files)
    await apply(job(fleet, environment, checkpoints, packages))
    ended = await until(
        "job",
        "grpo",
        fleet.namespace,
        lambda found: bool(condition(found, "Complete") or condition(found, "Failed")),
        END_S,
    )
    said = await kubectl("logs", "job/grpo", *here)
    assert ended["status"].get("succeeded") == 1, said
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    versions, result = [line for line in lines if "result" not in line], lines[-1]["result"]
    require_whole(versions)
    last = await committed(fleet, f"version-{VERSIONS + 1}")
    assert last["version"] == result["version"] == VERSIONS + 1
    assert last["digest"] == versions[-1]["digest"]
    lease = await get("lease", f"{fleet.name}-sender", fleet.namespace)
    assert not lease["spec"].get("holderIdentity")
