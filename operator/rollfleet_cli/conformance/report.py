"""What a run found, as data, as Markdown to attach to an issue, and as rows for a terminal."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import Any

from rollfleet_cli.conformance.checks.catalogue import CHECKS, NOT_TRIED
from rollfleet_cli.conformance.checks.check import Fault
from rollfleet_cli.conformance.running import Result, Verdict
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.state import Facts

FORMAT = 1  # raised where a key changes its meaning
SHOWN_FAULTS = 3  # of a check at an engine, in tables; the JSON has all
# Of an engine's configuration: what the spec asks for, and nothing that may be a secret.
ASKED_FOR = ("mode", "rl_config", "sleep_mode", "weight_transfer", "features", "accelerator", "nodes", "hold")
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel")


@dataclass(frozen=True)
class EngineRecord:
    """What one engine ran on."""

    pod: str
    node: str
    image: str
    image_id: str  # with the digest, as the container runtime tells it
    incarnation: str
    facts: dict[str, Any]
    node_info: dict[str, str] = field(default_factory=dict)  # kernel, architecture, kubelet; empty: may not be read
    followers: dict[str, str] = field(default_factory=dict)  # of an engine of several pods: the others, and their nodes


@dataclass(frozen=True)
class Row:
    """One check over all engines that were asked."""

    check: str
    title: str
    closes: str
    result: str
    seconds: float
    engines: int  # at which it was run
    skipped: str
    faults: tuple[dict[str, str], ...]  # engine, cause, told
    remedy: str  # of a failure


@dataclass(frozen=True)
class Report:
    """One run."""

    rollfleet: str  # version of this program
    started: datetime
    ended: datetime
    complete: bool  # False: not all was tried, or not of every engine that was chosen
    namespace: str
    fleet: str
    fleet_uid: str
    generation: int
    spec_sha256: str
    committed: dict[str, Any] | None
    asked_for: dict[str, Any]
    engines_present: int
    engines_chosen: str
    engines: tuple[EngineRecord, ...]
    checks: tuple[Row, ...]
    unreached: dict[str, str] = field(default_factory=dict)  # engines that were chosen and could not be asked
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> Counter[str]:
        """Checks by result."""
        return Counter(row.result for row in self.checks)

    @property
    def failed(self) -> tuple[Row, ...]:
        """What is not as promised."""
        return tuple(row for row in self.checks if row.result == Result.FAILED)

    @property
    def words(self) -> str:
        """In a line."""
        count = self.counts
        told = ", ".join(f"{count[each.value]} {each.value.lower()}" for each in Result)
        return f"{self.namespace}/{self.fleet}: {told}, on {len(self.engines)} of {self.engines_present} engines"

    def to_json(self) -> dict[str, Any]:
        """Stable keys."""
        counts = {each.value: self.counts[each.value] for each in Result}
        not_tried = [{"what": what, "why": why} for what, why in NOT_TRIED]
        return {"format": FORMAT, **asdict(self), "counts": counts, "not_tried": not_tried}


def spec_digest(fleet: RolloutEngine) -> str:
    """SHA-256 over the spec as sorted JSON, defaults written out."""
    text = json.dumps(fleet.spec.dump(), sort_keys=True, separators=(",", ":"))
    return f"sha256:{sha256(text.encode()).hexdigest()}"


def asked_for(config: EngineConfig) -> dict[str, Any]:
    """What the spec asks of each engine."""
    return config.model_dump(mode="json", by_alias=True, include={*ASKED_FOR, *PARALLEL})


def facts_of(facts: Facts) -> dict[str, Any]:
    """What the engine says that it is."""
    return facts.model_dump(mode="json", by_alias=True)


def rows_of(verdicts: list[Verdict]) -> tuple[Row, ...]:
    """Verdicts by check, in the order of the catalogue."""
    grouped: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        grouped.setdefault(verdict.check, []).append(verdict)
    return tuple(_row(name, grouped[name]) for name in CHECKS if name in grouped)


def _row(name: str, verdicts: list[Verdict]) -> Row:
    check = CHECKS[name]
    results = {verdict.result for verdict in verdicts}
    worst = next(each for each in (Result.FAILED, Result.PASSED, Result.SKIPPED) if each in results)
    faults = tuple(_fault(verdict.engine, fault) for verdict in verdicts for fault in verdict.faults)
    reasons = dict.fromkeys(verdict.skipped for verdict in verdicts if verdict.skipped)
    return Row(
        check=name,
        title=check.title,
        closes=check.closes.value,
        result=worst.value,
        seconds=round(max(verdict.seconds for verdict in verdicts), 3),
        engines=sum(verdict.of for verdict in verdicts if verdict.result is not Result.SKIPPED),
        skipped="; ".join(reasons),
        faults=faults,
        remedy=check.remedy if worst is Result.FAILED else "",
    )


def _fault(engine: str, fault: Fault) -> dict[str, str]:
    return {"engine": engine, "cause": fault.cause, "told": fault.told}


def to_markdown(report: Report) -> str:
    """For an issue: what it ran on first, then each check."""
    lines = [f"# Conformance of {report.namespace}/{report.fleet}", "", *_heading(report), ""]
    lines += ["## Engines", "", *_engine_lines(report), "", "## Checks", ""]
    lines += ["| result | check | what | closes | engines | seconds | why |", "|---|---|---|---|---|---|---|"]
    lines += [_check_line(row) for row in report.checks]
    for row in report.failed:
        lines += ["", f"### {row.check}", ""]
        lines += [f"- {_cell(words)}" for words in fault_words(row)]
        lines += [f"- remedy: {_cell(row.remedy)}"]
    lines += ["", "## Not tried", ""]
    lines += [f"- {what}: {why}" for what, why in NOT_TRIED]
    return "\n".join(lines) + "\n"


def fault_words(row: Row, most: int | None = None) -> list[str]:
    """Each fault in a line; the engine's own text last."""
    shown = row.faults[:most]
    lines = []
    for fault in shown:
        where = f"{fault['engine']}: " if fault["engine"] else ""
        lines.append(f"{where}{fault['cause']}{': ' + fault['told'] if fault['told'] else ''}")
    more = len(row.faults) - len(shown)
    return [*lines, f"and {more} more"] if more else lines


def _heading(report: Report) -> list[str]:
    held = report.committed or {}
    lines = [
        f"- {report.words}{'' if report.complete else '; **incomplete**: not all was tried'}",
        f"- {report.started.isoformat()} to {report.ended.isoformat()}, rollfleet {report.rollfleet}",
        f"- fleet {report.fleet_uid}, generation {report.generation}, spec {report.spec_sha256}",
        f"- committed version {held.get('version', 'none')}, {held.get('digest') or 'no digest'}",
        f"- engines: {report.engines_chosen}",
        f"- asked for: `{json.dumps(report.asked_for)}`",
    ]
    lines += [f"- {note}" for note in report.notes]
    return lines + [f"- {pod} could not be asked: {_cell(why)}" for pod, why in report.unreached.items()]


def _engine_lines(report: Report) -> list[str]:
    lines = ["| pod | node | image | guard | engine | platform | software |", "|---|---|---|---|---|---|---|"]
    for each in report.engines:
        facts, host = each.facts, each.facts.get("host", {})
        node = ", ".join((each.node, *(f"{name} {value}" for name, value in each.node_info.items())))
        node = "; ".join((node, *(f"{pod} on {where}" for pod, where in each.followers.items())))
        chips = f"NPUs {', '.join(map(str, host['npus']))}" if host.get("npus") else ""
        platform = " ".join(filter(None, (host.get("platform"), host.get("chip"), chips)))
        software = ", ".join(f"{name} {version}" for name, version in host.get("software", {}).items())
        image = f"{each.image} ({each.image_id})"
        engine = f"{facts['engine']} {facts['engineVersion']}"
        cells = (each.pod, node, image, facts["guardVersion"], engine, platform or "not told", software or "not told")
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return lines


def _check_line(row: Row) -> str:
    why = row.skipped if row.result == Result.SKIPPED else "; ".join(fault_words(row, 1))
    cells = (row.result, row.check, row.title, row.closes, str(row.engines), f"{row.seconds:.2f}", why)
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    """Words of others stay words in Markdown."""
    shown = text.replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return shown.replace("[", "\\[").replace("\n", " ").replace("\r", " ")
