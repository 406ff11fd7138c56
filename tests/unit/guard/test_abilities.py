"""C23: capabilities follow from the signatures of an engine's classes; the classes here stand for other releases."""

from typing import Literal

import pytest

from rollfleet_engine.guard.adapting import BY_WORKERS, PAUSES, SLEEPS
from rollfleet_engine.vllm.abilities import missing


class Client:
    """AsyncLLM as 0.27.1 has it."""

    def generate(self, prompt: str, *, data_parallel_rank: int | None = None) -> None: ...
    def init_weight_transfer_engine(self, request: object) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, request: object) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    def update_weight_version(self, new_version: str) -> None: ...


class Core:
    """EngineCore as 0.27.1 has it."""

    def pause_scheduler(self, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True) -> None: ...
    def resume_scheduler(self) -> None: ...
    def is_scheduler_paused(self) -> bool: ...
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool: ...
    def sleep(self, level: int = 1, mode: str = "abort") -> None: ...
    def wake_up(self, tags: list[str] | None = None) -> None: ...


class ClientWithoutLabels(Client):
    """AsyncLLM as 0.23 has it: the guard's own labels are enough."""

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None: ...
    def finish_weight_update(self) -> None: ...  # type: ignore[override]

    update_weight_version = None  # type: ignore[assignment]


class OlderClient(Client):
    """Weights came by one call."""

    start_weight_update = None  # type: ignore[assignment]


class ClientOfOneRank(Client):
    """It chooses the rank by itself."""

    def generate(self, prompt: str) -> None: ...  # type: ignore[override]


class CoreThatOnlyAborts(Core):
    """As before keep."""

    def pause_scheduler(self, mode: Literal["abort"] = "abort", clear_cache: bool = True) -> None: ...


class CoreWithoutModes(Core):
    """As it was at first."""

    def pause_scheduler(self) -> None: ...  # type: ignore[override]


class CoreThatCannotPause(Core):
    """Older still."""

    resume_scheduler = None  # type: ignore[assignment]


class CoreThatForgetsAll(Core):
    """Its cache is dropped in another way."""

    def reset_prefix_cache(self) -> bool: ...  # type: ignore[override]


class Sleepless(Core):
    """Without wake_up."""

    wake_up = None  # type: ignore[assignment]


@pytest.mark.parametrize("client", [Client, ClientWithoutLabels])
def test_the_releases_that_the_adapter_is_written_for_lack_nothing(client: type) -> None:
    assert dict(missing(client, Core)) == {}


@pytest.mark.parametrize(
    ("client", "core", "lacking", "words"),
    [
        (OlderClient, Core, BY_WORKERS, "OlderClient has no start_weight_update"),
        (ClientOfOneRank, Core, ("verify/Logprobs",), "data_parallel_rank"),
        (Client, CoreThatOnlyAborts, ("pause/keep",), "has the modes abort, not keep"),
        (Client, CoreWithoutModes, PAUSES, "has the modes none, not"),
        (Client, CoreThatCannotPause, PAUSES, "has no resume_scheduler"),
        (Client, CoreThatForgetsAll, PAUSES, "does not take reset_running_requests, reset_connector"),
        (Client, Sleepless, SLEEPS, "has no wake_up"),
    ],
)
def test_c23_what_a_release_lacks_is_named(client: type, core: type, lacking: tuple[str, ...], words: str) -> None:
    found = dict(missing(client, core))
    assert set(found) == set(lacking)
    assert all(words in why for why in found.values())
