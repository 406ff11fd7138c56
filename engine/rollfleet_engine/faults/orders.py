"""Corrupt a tensor, skip a layer: by the path of the order. The guard stages a damaged copy in the checkpoint's place.

A tensor that is to change after staging, as when the bytes on their way to the device do, is changed in a copy of which
nobody else knows, when the order to transfer passes.
"""

import json
import os
import shutil
import threading
import uuid
from pathlib import Path
from typing import Any

from rollfleet_engine.faults.copies import Tensors, copy_checkpoint, drop_layer, flip_bit, tensors_of
from rollfleet_engine.faults.injector import Strike
from rollfleet_engine.faults.plan import Call, FaultType, Plan, PlanError, Rule, choose
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.weights.coverage import layer_of
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.headers import TensorEntry
from rollfleet_engine.weights.layout import check_relative
from rollfleet_protocol.commands import CheckpointRoot
from rollfleet_protocol.engine_config import EngineConfig

FOLDER = ".rollfleet-faults"  # below the checkpoints: the guard takes no path that leads out


class Orders:
    """The orders of one engine, and the one copy that it may be given."""

    def __init__(self, config: EngineConfig, log: GuardLog) -> None:
        self._model = Path(config.model.path)
        self._checkpoints = None if config.checkpoints_path is None else Path(config.checkpoints_path)
        self._log = log
        self._one = threading.Lock()  # an order whose sender gave up may still be copying when it comes again
        self._asked: tuple[Any, ...] | None = None  # the order that got the copy: repeated, it gets the same
        self._source = ""  # path of the original
        self._copy: Path | None = None

    def require(self, plan: Plan) -> Plan:
        """The same plan, if its damage can be done here. Raises PlanError."""
        obstacle = self._obstacle()
        if obstacle and any(_damages(rule) for rule in plan.rules):
            raise PlanError(obstacle)
        return plan

    def reduced(self, plan: Plan) -> Plan:
        """The plan without what cannot be done here, which is logged; other rules are drawn as they would be."""
        obstacle = self._obstacle()
        if not obstacle:
            return plan
        self._log.write("faults.left_out", faults=[FaultType.CORRUPT, FaultType.SKIP], why=obstacle)
        return plan.model_copy(update={"rules": tuple(rule for rule in plan.rules if not _damages(rule))})

    def _obstacle(self) -> str:
        if self._checkpoints is None:
            return "corrupt and skip need a checkpoints folder, and this engine has none (checkpointsPath)"
        if not os.access(self._checkpoints, os.W_OK):
            return f"corrupt and skip put damaged copies below {self._checkpoints}, which cannot be written to"
        return ""

    def wanted(self, plan: Plan, strike: Strike | None) -> bool:
        """Whether orders have to be read."""
        return strike is not None or self._asked is not None or plan.has(FaultType.CORRUPT, Call.TRANSFER)

    def rewrite(self, call: Call, body: bytes, plan: Plan, strike: Strike | None) -> bytes:
        """The order as the guard is to get it. Blocks: for a thread."""
        with self._one:
            return self._rewrite(call, body, plan, strike)

    def _rewrite(self, call: Call, body: bytes, plan: Plan, strike: Strike | None) -> bytes:
        try:
            if call is Call.PREPARE:
                return self._prepare(json.loads(body), body, plan, strike)
            if strike is not None:
                self._corrupt_copy(plan, strike)
        except CheckpointError as error:
            self._log.write("faults.not_done", call=call, error=error.message)
        except (OSError, KeyError, TypeError, ValueError) as error:  # nothing that a guard would take
            self._log.write("faults.not_done", call=call, error=f"{type(error).__name__}: {error}")
        return body

    def close(self) -> None:
        """Remove the copy."""
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)
        self._copy, self._asked = None, None

    def _prepare(self, order: dict[str, Any], body: bytes, plan: Plan, strike: Strike | None) -> bytes:
        source = order["source"]
        asked = (order["epoch"], order["version"], source.get("root"), source["path"])
        if self._copy is None or asked != self._asked or strike is not None:
            self.close()
            if self._checkpoints is None or (strike is None and not plan.has(FaultType.CORRUPT, Call.TRANSFER)):
                return body
            copy = self._checkpoints / FOLDER / uuid.uuid4().hex  # engines share the folder, and are all process 1
            check_relative(source["path"])
            root = self._model if source.get("root") == CheckpointRoot.MODEL else self._checkpoints
            self._make(root / source["path"], copy, source["path"], plan, strike)
            self._asked, self._source, self._copy = asked, source["path"], copy
        changed = {"path": f"{FOLDER}/{self._copy.name}", "root": CheckpointRoot.CHECKPOINTS}
        return json.dumps({**order, "source": {**source, **changed}}).encode()

    def _make(self, source: Path, copy: Path, path: str, plan: Plan, strike: Strike | None) -> None:
        tensors = tensors_of(source)
        if not tensors:
            raise ValueError(f"no tensors in {source}")
        if strike is not None and strike.rule.fault is FaultType.SKIP:
            layer = _one_of(list({layer_of(name) for name in tensors}), strike.rule.layer, plan.seed, "layer", path)
            drop_layer(source, copy, layer)
            self._log.write("faults.damaged", checkpoint=path, layer=layer)
            return
        corrupted = [rule for rule in plan.rules if rule.fault is FaultType.CORRUPT]
        copy_checkpoint(source, copy, frozenset(_victim(tensors, rule, plan, path)[0].name for rule in corrupted))
        if strike is not None:
            self._flip(copy, tensors, strike.rule, plan, path)

    def _corrupt_copy(self, plan: Plan, strike: Strike) -> None:
        if self._copy is None:
            raise ValueError("nothing was prepared since this plan was read")
        self._flip(self._copy, tensors_of(self._copy), strike.rule, plan, self._source)

    def _flip(self, copy: Path, tensors: Tensors, rule: Rule, plan: Plan, path: str) -> None:
        file, entry = _victim(tensors, rule, plan, path)
        flip_bit(copy / file.name, entry)
        self._log.write("faults.damaged", checkpoint=path, tensor=entry.name, file=file.name)


def _damages(rule: Rule) -> bool:
    """Whether it takes a copy."""
    return rule.fault in (FaultType.CORRUPT, FaultType.SKIP) and not rule.call.inside


def _victim(tensors: Tensors, rule: Rule, plan: Plan, path: str) -> tuple[Path, TensorEntry]:
    """The same one whenever it is asked for."""
    return tensors[_one_of(list(tensors), rule.tensor, plan.seed, "tensor", path)]


def _one_of(names: list[str], wanted: str | None, *parts: object) -> str:
    if wanted is None:
        return choose(names, *parts)
    if wanted not in names:
        raise ValueError(f"no {wanted!r} among {', '.join(sorted(names)[:5])}, ...")
    return wanted
