"""A real vLLM engine in a process of its own, told what to do call by call (tests/vllm/driver.py)."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from devtools import vllm_venv
from devtools.tiny_models import ROOT
from tests.support.tiny import source_path

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
DRIVER = ROOT / "tests" / "vllm" / "driver.py"


class CallError(Exception):
    """The engine's side raised EngineError or CheckpointError."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['reason']}: {error['message']}")
        self.reason: str = error["reason"]
        self.message: str = error["message"]
        self.touched: bool = error["touched"]


class VllmEngine:
    """Starts on entering, stops on leaving. The log stays at `log`."""

    def __init__(self, model: Path, log: Path, environment: Mapping[str, str] | None = None, **arguments: Any) -> None:
        self.log = log
        self._environment = dict(environment or {})
        self._arguments = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "weight_transfer_config": {"backend": "rollfleet"},
            "worker_extension_cls": "rollfleet_engine.vllm.worker.RollfleetWorkerExtension",
        } | arguments

    def __enter__(self) -> Self:
        read, write = os.pipe()
        environment = os.environ | {
            "PYTHONPATH": source_path(),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment |= self._environment
        interpreter = vllm_venv.ensure() / "bin" / "python"
        command = [str(interpreter), str(DRIVER), str(write), json.dumps(self._arguments)]
        with self.log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
                env=environment,
                text=True,
            )
        os.close(write)
        self._answers = read
        self._buffer = b""
        self._read(START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._answers)

    def call(self, name: str, /, **arguments: Any) -> Any:
        """One call of the driver; raises CallError for its errors."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._read(CALL_TIMEOUT_S)
        if "error" in answer:
            raise CallError(answer["error"])
        return answer["ok"]

    def _read(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._answers, 1 << 16) if ready else b""
            if not part:
                why = "ended" if ready else f"gave no answer within {timeout_s:.0f} s"
                tail = "\n".join(self.log.read_text(encoding="utf-8").splitlines()[-30:])
                raise AssertionError(f"the engine's process {why}; its log ends with\n{tail}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)
