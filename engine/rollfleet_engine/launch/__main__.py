"""`python -m rollfleet_engine.launch`: PID 1 of an engine's container."""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rollfleet_engine.launch.causes import CauseFinder
from rollfleet_engine.launch.facts import Facts
from rollfleet_engine.launch.plan import Plan, Refused, plan
from rollfleet_engine.launch.preflight import UnknownEngineError, observe
from rollfleet_engine.launch.supervise import Outcome, Supervisor
from rollfleet_engine.launch.termination import DEFAULT_LOG, LOG_VARIABLE, exit_code_of, write
from rollfleet_protocol.engine_config import HOST_ENV, EngineConfigError, config_of
from rollfleet_protocol.termination import EXIT_CONFIGURATION, Problem, TerminationMessage

_ARGPARSE_EXIT = 2  # what argparse ends with when it refuses a command line


def log(event: str, **fields: object) -> None:
    """One JSON line beside the engine's own."""
    print(json.dumps({"event": event, **fields}), flush=True)


def read_plan(environ: Mapping[str, str]) -> tuple[Plan | Refused, Facts | None]:
    """What to start, or why not, and what was seen where anybody looked."""
    try:
        config = config_of(environ)
        facts = observe(config, environ)
        return plan(config, facts), facts
    except EngineConfigError as error:
        cause = str(error)
        remedy = "the operator sets it; operator and engine image must be of the same release"
    except UnknownEngineError as error:
        cause, remedy = str(error), "set it in the engine's image"
    return Refused((Problem(cause=cause, remedy=remedy),)), None


def refuse(problems: tuple[Problem, ...], log_path: Path) -> int:
    """Say why nothing is started."""
    code = exit_code_of(problems)
    for problem in problems:
        log("problem", **problem.model_dump(by_alias=True))
    _report(TerminationMessage(exit_code=code, problems=problems), log_path)
    return code


def report_outcome(outcome: Outcome, finder: CauseFinder, log_path: Path) -> int:
    """Say how the engine ended, and answer our own exit code."""
    code = outcome.exit_code
    if not outcome.asked_to_stop:
        # An engine has no reason to end; vLLM ends with 0 when its watchdog finds the core dead.
        code = {0: 1, _ARGPARSE_EXIT: EXIT_CONFIGURATION}.get(code, code)
    log(
        "engine-ended",
        exitCode=code,
        signal=outcome.signal_name,
        askedToStop=outcome.asked_to_stop,
        killedAfterGrace=outcome.killed_after_grace,
    )
    if outcome.asked_to_stop:
        return code
    cause = finder.cause(time.monotonic())
    if not cause:
        by = outcome.signal_name or "itself"
        cause = f"the engine was ended by {by} and logged no error"
    _report(TerminationMessage(exit_code=code, error=cause, log_tail=finder.tail()), log_path)
    return code


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
    planned, facts = read_plan(environ)
    if isinstance(planned, Refused):
        code = refuse(planned.problems, log_path)
        _show(facts)
        return code
    print(planned.to_json(), flush=True)
    _show(facts)
    finder = CauseFinder()
    supervisor = Supervisor(tell_guard(planned, facts), environ, finder)
    return report_outcome(supervisor.run(), finder, log_path)


if __name__ == "__main__":
    sys.exit(main())
