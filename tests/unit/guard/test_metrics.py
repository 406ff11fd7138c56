"""The guard's series behind the engine's, on /metrics."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse, Response

from rollfleet_engine.guard.metrics import GuardCollector, MetricsPage
from rollfleet_engine.guard.serving import Serving
from rollfleet_engine.guard.tallies import BOUNDS_S, ClosedTime, Durations
from rollfleet_protocol.commands import PauseMode
from rollfleet_protocol.refusals import ClosedReason
from rollfleet_protocol.state import OperationName
from tests.support.guards import Guarded, request

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def page(guarded: Guarded, engine: Response) -> httpx.AsyncClient:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert not {name for name, _ in scope["headers"]} & {b"accept", b"accept-encoding"}
        await engine(scope, receive, send)

    tallies = guarded.service.tallies
    metrics = MetricsPage(app, GuardCollector(guarded.service.state, tallies, lambda: 0.0))
    serving = Serving(
        guarded.app, guarded.turnstile, guarded.service, guarded.waiting, tallies=tallies, metrics=metrics
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(serving), base_url="http://engine")  # type: ignore[arg-type]


async def scrape(guarded: Guarded) -> Series:
    async with page(guarded, PlainTextResponse("engine_series 7", media_type="text/plain; version=0.0.4")) as client:
        answer = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    families = text_string_to_metric_families(answer.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def of(series: Series, name: str, **labels: str) -> float:
    return series[f"rollfleet_guard_{name}", tuple(sorted(labels.items()))]


async def test_what_happened_is_counted(guarded: Guarded) -> None:
    guarded.serving = Serving(
        guarded.app, guarded.turnstile, guarded.service, guarded.waiting, tallies=guarded.service.tallies
    )
    assert (await request(guarded))[0] == 503
    await guarded.serve_initial()
    assert (await request(guarded))[0] == 200
    await guarded.prepare(2, 7)
    await guarded.close(2, 7, mode=PauseMode.ABORT)
    assert (await request(guarded))[0] == 503
    assert (await request(guarded, "/nothing"))[0] == 404
    series = await scrape(guarded)
    assert series["engine_series", ()] == 7
    assert of(series, "requests_admitted_total") == 1
    assert of(series, "requests_refused_total", reason="Starting") == 1
    assert of(series, "requests_refused_total", reason="Updating") == 1
    assert of(series, "requests_refused_total", reason="NotFound") == 1
    assert (of(series, "gate_open"), of(series, "epoch"), of(series, "weight_version")) == (0, 2, 0)
    assert of(series, "weights", state="Verified") == 1
    assert sum(value for (name, _), value in series.items() if name == "rollfleet_guard_weights") == 1
    assert of(series, "operation_seconds_count", operation="Close", status="Succeeded") == 1
    assert of(series, "operation_seconds_bucket", operation="Close", status="Succeeded", le="+Inf") == 1
    assert (of(series, "requests_in_flight"), of(series, "requests_kept"), of(series, "requests_held")) == (0, 0, 0)


async def test_before_anything_happened_there_is_no_version(guarded: Guarded) -> None:
    series = await scrape(guarded)
    assert of(series, "gate_open") == 0
    assert ("rollfleet_guard_weight_version", ()) not in series


@pytest.mark.parametrize(
    "engine",
    [
        Response(b"broken", 500, media_type="text/plain"),
        Response(b"# EOF\n", 200, media_type="application/openmetrics-text"),
    ],
)
async def test_an_answer_that_is_no_exposition_is_passed_on_as_it_is(guarded: Guarded, engine: Response) -> None:
    async with page(guarded, engine) as client:
        answer = await client.get("/metrics")
    assert (answer.status_code, answer.content) == (engine.status_code, engine.body)


def test_the_time_that_a_gate_is_closed() -> None:
    closed = ClosedTime(100.0)
    assert closed.sums(103.0)[ClosedReason.STARTING] == 3.0
    closed.move(None, 105.0)
    closed.move(ClosedReason.UPDATING, 200.0)
    closed.move(ClosedReason.UNCERTAIN, 201.0)
    assert closed.sums(205.0) == {
        ClosedReason.STARTING: 5.0,
        ClosedReason.UPDATING: 1.0,
        ClosedReason.UNCERTAIN: 4.0,
        ClosedReason.ASLEEP: 0.0,
        ClosedReason.WEIGHTS_ABSENT: 0.0,
        ClosedReason.DRAINING: 0.0,
        ClosedReason.ENGINE_DEAD: 0.0,
    }


def test_durations_fall_into_cumulative_buckets() -> None:
    durations = Durations()
    for seconds in (0.05, 0.06, 10_000.0):
        durations.add(seconds)
    buckets = dict(durations.buckets())
    assert (buckets["0.05"], buckets["0.1"], buckets["1800"], buckets["+Inf"]) == (1, 2, 2, 3)
    assert len(buckets) == len(BOUNDS_S) + 1


def test_the_page_of_metrics_names_every_operation() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if "`rollfleet_guard_operation_seconds`" in line)
    told = re.findall(r"`(\w+)`", row.partition("`operation`: ")[2].partition(";")[0])
    assert set(told) == {name.value for name in OperationName}
