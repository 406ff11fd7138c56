"""C22: a namespace goes in mid-update; objects go while no engine answers."""

import os
import signal

import pytest

from examples.demo.environment import Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.kubectl import KubectlError, get, kubectl
from tests.e2e.phases import watching
from tests.support.victims import give_signal, processes_of

REPLICAS = 2
AT_ONCE_S = 20.0


async def test_c22_a_namespace_goes_in_mid_update(environment: Environment, fleet: Fleet) -> None:
    kind = environment.simulated(slow=True)
    await fleet.create(kind, REPLICAS)
    await fleet.serving(REPLICAS)
    async with watching(fleet) as update:
        await fleet.bump(1, folders(kind.models)[1].name)
        await update.reached(1, "Transferring")
        await fleet.delete(timeout_s=90)
    with pytest.raises(KubectlError, match="NotFound"):
        await get("namespace", fleet.namespace, "")


async def test_c22_objects_go_while_no_engine_answers(environment: Environment, fleet: Fleet) -> None:
    """Stopped processes hold their connections open and say nothing: worse than dead ones."""
    kind = environment.simulated(slow=True)
    await fleet.create(kind, REPLICAS)
    await fleet.serving(REPLICAS)
    stopped = [pid for pod in await fleet.pods() for pid in processes_of(pod["metadata"]["uid"])]
    try:
        async with watching(fleet) as update:
            await fleet.bump(1, folders(kind.models)[1].name)
            await update.reached(1, "Quiescing")
            give_signal(stopped, signal.SIGSTOP)
            for what, name in (("weightversion", fleet.weight_version), ("rolloutengine", fleet.name)):
                await kubectl("delete", what, name, "-n", fleet.namespace, timeout_s=AT_ONCE_S)
        await kubectl("delete", "namespace", fleet.namespace, timeout_s=120)
    finally:
        for pid in stopped:
            _continue(pid)


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return  # the kubelet has ended it
