"""Makes vLLM know our transfer back end.

vLLM calls `register` in every process through the entry point `vllm.general_plugins`. Importing the worker extension
calls it too: that happens in every worker before the model is loaded, and holds where the distribution's metadata is
not on the path or VLLM_PLUGINS leaves our entry point out.
"""

from functools import cache

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "rollfleet"


@cache
def register() -> None:
    """Add the back end to vLLM's registry; its module is imported only when an engine is made."""
    WeightTransferEngineFactory.register_engine(
        BACKEND, "rollfleet_engine.vllm.transfer_engine", "RollfleetWeightTransferEngine"
    )
