"""vLLM-Ascend's npu_ipc engine: what is used of it for ipc. Its class of update words is vLLM's own, as there.

With VLLM_ASCEND naming a checkout, that checkout's own module is used instead, on the CPU (`make check-ascend`); the
NPU's name is ours all the same, since here one process may stand for several.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

CHECKOUT = "VLLM_ASCEND"


@dataclass
class NPUIPCWeightTransferUpdateInfo(IPCWeightTransferUpdateInfo): ...


if CHECKOUT in os.environ:
    file = Path(os.environ[CHECKOUT]) / "vllm_ascend/distributed/weight_transfer/npu_ipc_engine.py"
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"))  # noqa: S102 - of a checkout that the caller names


def npu_generate_uuid(logical_device: int | None = None) -> str:
    return f"127.0.0.1-{os.environ.get('STAND_IN_NPU', '0')}"
