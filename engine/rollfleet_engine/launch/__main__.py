"""`python -m rollfleet_engine.launch`: PID 1 of an engine's container."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rollfleet_engine.guard.local import BEYOND_DRAIN_S, SOCKET_NAME
from rollfleet_engine.launch.causes import CauseFinder
from rollfleet_engine.launch.facts import Facts
from rollfleet_engine.launch.lifeline import Lifeline
from rollfleet_engine.launch.meeting import MeetingError, StoppedError, meet
from rollfleet_engine.launch.plan import Plan, Refused, plan
from rollfleet_engine.launch.preflight import UnknownEngineError, observe
from rollfleet_engine.launch.supervise import WAITED, Bond, Outcome, SignalPipe, Supervisor
from rollfleet_engine.launch.termination import DEFAULT_LOG, LOG_VARIABLE, exit_code_of, write
from rollfleet_engine.prestop import drain
from rollfleet_protocol.engine_config import (
    HOST_ENV,
    EngineConfig,
    EngineConfigError,
    NodesConfig,
    Place,
    config_of,
)
from rollfleet_protocol.termination import EXIT_CONFIGURATION, EXIT_TEMPORARY, Problem, TerminationMessage

_ARGPARSE_EXIT = 2  # what argparse ends with when it refuses a command line


def log(event: str, **fields: object) -> None:
    """One JSON line beside the engine's own."""
    print(json.dumps({"event": event, **fields}), flush=True)


@dataclass(frozen=True)
class Prepared:
    """What to start, or why not, and what was seen where anybody looked."""

    planned: Plan | Refused
    config: EngineConfig | None = None
    facts: Facts | None = None


def read_plan(environ: Mapping[str, str]) -> Prepared:
    """From the variables and one look at the container."""
    try:
        config = config_of(environ)
        facts = observe(config, environ)
        return Prepared(plan(config, facts), config, facts)
    except EngineConfigError as error:
        cause = str(error)
        remedy = "the operator sets it; operator and engine image must be of the same release"
    except UnknownEngineError as error:
        cause, remedy = str(error), "set it in the engine's image"
    return Prepared(Refused((Problem(cause=cause, remedy=remedy),)))


def refuse(problems: tuple[Problem, ...], log_path: Path) -> int:
    """Say why nothing is started."""
    code = exit_code_of(problems)
    for problem in problems:
        log("problem", **problem.model_dump(by_alias=True))
    _report(TerminationMessage(exit_code=code, problems=problems), log_path)
    return code


def report_outcome(outcome: Outcome, finder: CauseFinder, log_path: Path, bond: Bond | None = None) -> int:
    """Say how the engine ended, and answer our own exit code."""
    code = _code_of(outcome, bond)
    log(
        "engine-ended",
        exitCode=code,
        signal=outcome.signal_name,
        askedToStop=outcome.asked_to_stop,
        killedAfterGrace=outcome.killed_after_grace,
        lost=outcome.lost,
    )
    if outcome.asked_to_stop:
        if bond is not None:
            bond.lifeline.end("was told to stop")
        return code
    cause = _cause_of(outcome, finder)
    if bond is not None:
        # The leader's message is what the fleet's status shows: it hears first whether another node failed before it.
        other = bond.lifeline.last_words() if bond.leads else ""
        bond.lifeline.end(cause)
        cause = f"{other}; here: {cause}" if other and other not in cause else cause
    _report(TerminationMessage(exit_code=code, error=cause, log_tail=finder.tail()), log_path)
    return code


def _code_of(outcome: Outcome, bond: Bond | None) -> int:
    """An engine has no reason to end; vLLM ends with 0 when its watchdog finds the core dead.

    Of an engine of several pods the leader's end counts; a pod that ended because of another is started again.
    """
    if outcome.asked_to_stop:
        return outcome.exit_code
    if outcome.lost:
        return 1 if bond is None or bond.leads else EXIT_TEMPORARY
    return {0: 1, _ARGPARSE_EXIT: EXIT_CONFIGURATION}.get(outcome.exit_code, outcome.exit_code)


def _cause_of(outcome: Outcome, finder: CauseFinder) -> str:
    if outcome.lost:
        return f"an engine of several nodes ends as one: {outcome.lost}"
    by = outcome.signal_name or "itself"
    return finder.cause(time.monotonic()) or f"the engine was ended by {by} and logged no error"


def _report(message: TerminationMessage, path: Path) -> None:
    if failure := write(message, path):
        log("problem", cause=failure)


def tell_guard(planned: Plan, facts: Facts | None) -> Plan:
    """The same plan, whose engine's guard knows what was seen of the container."""
    if facts is None:
        return planned
    return replace(planned, env={**planned.env, HOST_ENV: facts.host().model_dump_json(by_alias=True)})


def _show(facts: Facts | None) -> None:
    if facts is not None:
        log("preflight", **facts.shown())


def main() -> int:
    """Plan, start, look after."""
    environ = dict(os.environ)
    log_path = Path(environ.get(LOG_VARIABLE, DEFAULT_LOG))
    prepared = read_plan(environ)
    planned, config = prepared.planned, prepared.config
    if isinstance(planned, Refused) or config is None or prepared.facts is None:
        code = refuse(planned.problems if isinstance(planned, Refused) else (), log_path)
        _show(prepared.facts)
        return code
    bond = signals = None
    if config.nodes is not None and config.place is not None:
        signals = SignalPipe(WAITED)
        try:
            config, bond = _meet(config, config.nodes, config.place, planned.release, signals)
        except MeetingError as error:
            return refuse((error.problem,), log_path)
        except StoppedError:
            log("stopped", cause="this pod was told to stop while it waited for the engine's other nodes")
            return 128 + signal.SIGTERM
        planned = plan(config, prepared.facts)
        if isinstance(planned, Refused):  # of a variable that says what only the meeting could tell
            bond.lifeline.end(planned.problems[0].cause)
            return refuse(planned.problems, log_path)
    print(planned.to_json(), flush=True)
    _show(prepared.facts)
    finder = CauseFinder()
    told = tell_guard(planned, prepared.facts)
    supervisor = Supervisor(told, environ, finder, bond=bond, signals=signals)
    return report_outcome(supervisor.run(), finder, log_path, bond)


def _meet(
    config: EngineConfig, nodes: NodesConfig, place: Place, release: str, signals: SignalPipe
) -> tuple[EngineConfig, Bond]:
    """The configuration with the addresses of all, and what holds them together from now on."""
    log("meeting", node=place.node, nodes=nodes.count, leader=place.leader, host=place.leader_host)
    met = meet(config, nodes, place, release, signals)
    log("met", leaderAddress=met.place.leader_address, ownAddress=met.place.own_address)
    lifeline = Lifeline(met.lines)
    lifeline.start()
    drain_s = config.drain_timeout_seconds + BEYOND_DRAIN_S

    def drain_guard() -> None:
        try:
            log("drained", words=drain(Path(config.run_dir) / SOCKET_NAME, drain_s))
        except (OSError, ValueError) as error:
            log("problem", cause=f"the engine is stopped without draining: {type(error).__name__}: {error}")

    return config.model_copy(update={"place": met.place}), Bond(lifeline, place.leads, drain_s, drain_guard)


if __name__ == "__main__":
    sys.exit(main())
