"""Makes vLLM know our transfer back end, and keeps it from starving its neighbours on a CPU.

vLLM calls `register` in every process through the entry point `vllm.general_plugins`. Importing the worker extension
calls it too: that happens in every worker before the model is loaded, and holds where the distribution's metadata is
not on the path or VLLM_PLUGINS leaves our entry point out.
"""

from functools import cache

import vllm.distributed.utils
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

BACKEND = "rollfleet"


@cache
def register() -> None:
    """Add the back end to vLLM's registry; its module is imported only when an engine is made."""
    if current_platform.is_cpu():
        _sleep_between_looks()
    WeightTransferEngineFactory.register_engine(
        BACKEND, "rollfleet_engine.vllm.transfer_engine", "RollfleetWeightTransferEngine"
    )


def _sleep_between_looks() -> None:
    """Let the core and its workers wait for each other by sleeping, not by sched_yield.

    vLLM's shared-memory queue calls sched_yield in a loop while it waits, and for a second after. Where the engine has
    a core for each of its processes that costs nothing. A CPU engine shares its cores with its own API server and with
    other pods, and Linux 6.18 was seen not to schedule other cgroups at all while that loop runs: for 20 s, the kubelet
    and the guard among them. time.sleep(0), which vLLM itself falls back to on older interpreters, gives way for 50 us
    and cost no throughput that could be measured.
    """
    vllm.distributed.utils.USE_SCHED_YIELD = False
