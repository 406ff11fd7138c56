"""What of the model's folder keeps an engine from starting, each with cause and remedy. Pure."""

from collections.abc import Iterator, Sequence

from rollfleet_engine.launch.facts import Facts, ModelFolder
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.termination import Problem

_MOST_NAMED = 5  # files of one problem: a message has room for few


def model_problems(config: EngineConfig, facts: Facts) -> Iterator[Problem]:
    """First what keeps the folder from being read at all, else what is missing or broken in it."""
    path, folder = config.model.path, facts.model
    if not path.startswith("/"):
        yield Problem(cause=f"model path {path!r} is not absolute", remedy="give the path inside the container")
    elif not folder.exists:
        yield Problem(
            cause=f"model path {path} does not exist", remedy="correct spec.model.path, or put the model on its volume"
        )
    elif not folder.is_folder:
        yield Problem(cause=f"model path {path} is not a folder", remedy="name the folder that holds config.json")
    elif folder.error:
        yield Problem(cause=f"model path {path}: {folder.error}", remedy="repair it on its volume", retry_may_cure=True)
    else:
        yield from _files(path, folder)


def _files(path: str, folder: ModelFolder) -> Iterator[Problem]:
    """A model that is still being copied looks like this, so that a restart may find it whole."""
    absent = [] if folder.has_config else ["config.json"]
    absent += folder.missing_files
    if not folder.weight_files and not folder.missing_files:
        absent.append("*.safetensors")
    if absent:
        yield Problem(
            cause=f"model path {path} is incomplete: {_named(absent)} not found",
            remedy="copy the model completely onto its volume",
            retry_may_cure=True,
        )
    if folder.cut_files:
        yield Problem(
            cause=f"model path {path} is incomplete: {_named(folder.cut_files)}",
            remedy="copy the model completely onto its volume",
            retry_may_cure=True,
        )
    if folder.broken_files:
        yield Problem(
            cause=f"model path {path}: {_named(folder.broken_files)}",
            remedy="put real safetensors files there; of a repository with Git LFS, its files instead of pointers",
        )
    if folder.config_error:
        yield Problem(
            cause=f"model path {path}: {folder.config_error}",
            remedy="copy config.json anew from where the model was saved",
            retry_may_cure=True,
        )


def _named(files: Sequence[str]) -> str:
    more = f" and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
    return ", ".join(files[:_MOST_NAMED]) + more
