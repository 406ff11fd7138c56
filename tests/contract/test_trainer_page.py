"""The first lines of docs/trainer.md, which are what a user wants to write, run as they stand against real guards."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.models import Models
from tests.contract.process import EngineProcess, Kind, Site
from tests.contract.sdk_scene import Process, Scene, running_engines


@pytest.fixture(scope="module")
def engines(kind: Kind, site: Site, models: Models) -> Iterator[list[EngineProcess]]:
    with running_engines(kind, site, models, "page", 1) as started:
        yield started


@pytest.fixture
def scene(engines: list[EngineProcess], site: Site, models: Models, tmp_path: Path) -> Iterator[Scene]:
    process = Process("tests.contract.page_process", ROLLFLEET_CHECKPOINTS=str(tmp_path))
    one = Scene(engines, site, models, process)
    one.open()
    yield one
    one.close()
    process.close()


@pytest.mark.parametrize("form", ["async", "blocking"])
def test_what_a_user_wants_to_write_works(scene: Scene, form: str):
    asked = {"endpoint": scene.engines[0].serving_url, "prompt": scene.models.short_prompt}
    number = scene.ask(2, form, what="page", **asked)
    scene.succeed(number, 2)
    result = scene.do("result")
    assert result.get("update", {}).get("digest") == scene.models.digest(2), result
    if form == "async":
        copy = {"recovers": number, "path": "step-70", "digest": scene.models.digest(2)}
        assert result["told"] == copy | {"versions": [number]}
