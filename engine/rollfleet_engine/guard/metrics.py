"""The guard's series on the engine's own /metrics, behind the engine's.

They are appended to the answer, not registered with the engine: vLLM's registry is its own affair, and with several
processes it is read from files. So the engine is asked for plain text, uncompressed, whatever the scraper would take.
Every label has a fixed set of values; none comes from a request.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from rollfleet_engine.guard.answers import AsgiApp, Message, Receive, Scope, Send
from rollfleet_engine.guard.tallies import Tallies
from rollfleet_protocol.state import EngineState, Gate, WeightsState

PATH = "/metrics"
TEXT = b"text/plain"
_NEGOTIATION = (b"accept", b"accept-encoding")


class GuardCollector(Collector):
    """All series of one guard, read at the scrape."""

    def __init__(self, state: Callable[[], EngineState], tallies: Tallies, now: Callable[[], float]) -> None:
        self._state = state
        self._tallies = tallies
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """As docs/metrics.md lists them."""
        state, tallies = self._state(), self._tallies
        yield from _gauges(state)
        admitted = "Requests that were admitted to the engine."
        yield CounterMetricFamily("rollfleet_guard_requests_admitted", admitted, value=tallies.admitted)
        refused = CounterMetricFamily(
            "rollfleet_guard_requests_refused", "Requests on the serving port that were refused.", labels=("reason",)
        )
        for reason, count in sorted(tallies.refused.items()):
            refused.add_metric((reason,), count)
        closed = CounterMetricFamily(
            "rollfleet_guard_closed_seconds", "Seconds that the gate was closed, by reason.", labels=("reason",)
        )
        for why, seconds in tallies.closed.sums(self._now()).items():
            closed.add_metric((why.value,), seconds)
        calls = CounterMetricFamily(
            "rollfleet_guard_control_calls", "Calls on the control port.", labels=("command", "outcome")
        )
        for (command, outcome), count in sorted(tallies.control.items()):
            calls.add_metric((command, outcome), count)
        seconds_of = HistogramMetricFamily(
            "rollfleet_guard_operation_seconds", "Operations that ended.", labels=("operation", "status")
        )
        for (operation, status), durations in sorted(tallies.operations.items()):
            seconds_of.add_metric((operation, status), durations.buckets(), durations.total_s)
        yield from (refused, closed, calls, seconds_of)


def _gauges(state: EngineState) -> Iterable[Metric]:
    def gauge(name: str, meaning: str, value: float) -> Metric:
        return GaugeMetricFamily(f"rollfleet_guard_{name}", meaning, value=value)

    yield gauge("requests_in_flight", "Requests that were admitted and have not ended.", state.in_flight)
    yield gauge("requests_kept", "Requests that are frozen over an update.", state.kept)
    yield gauge("requests_held", "Requests that wait at the closed gate.", state.held)
    yield gauge("gate_open", "Whether inference is admitted.", int(state.gate is Gate.OPEN))
    yield gauge("epoch", "The newest epoch that was commanded.", state.epoch)
    if state.weights.version is not None:
        yield gauge("weight_version", "Version of the weights that are held.", state.weights.version)
    weights = GaugeMetricFamily(
        "rollfleet_guard_weights", "1 for the state of the weights that are held.", labels=("state",)
    )
    for each in WeightsState:
        weights.add_metric((each.value,), int(each is state.weights.state))
    yield weights


class MetricsPage:
    """GET /metrics: the engine's answer and ours."""

    def __init__(self, app: AsgiApp, collector: Collector) -> None:
        self._app = app
        self._registry = CollectorRegistry()
        self._registry.register(collector)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [header for header in scope["headers"] if header[0] not in _NEGOTIATION]
        page = _Appended(send, lambda: generate_latest(self._registry))
        await self._app({**scope, "headers": headers}, receive, page.send)


class _Appended:
    """Holds the head of an answer back until its whole length is known."""

    def __init__(self, send: Send, ours: Callable[[], bytes]) -> None:
        self._send = send
        self._ours = ours
        self._head: Message | None = None  # None: passed on as it comes
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_text(message):
            self._head = message
        elif message["type"] == "http.response.body" and self._head is not None:
            await self._take(message)
        else:
            await self._send(message)

    async def _take(self, message: Message) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body") or self._head is None:
            return
        if self._body and not self._body.endswith(b"\n"):
            self._body += b"\n"
        self._body += self._ours()
        others = [header for header in self._head["headers"] if header[0].lower() != b"content-length"]
        length = (b"content-length", str(len(self._body)).encode())
        await self._send({**self._head, "headers": [*others, length]})
        await self._send({"type": "http.response.body", "body": bytes(self._body)})


def _is_text(head: Message) -> bool:
    """Whether this is an exposition that can be added to."""
    kinds = [value for name, value in head["headers"] if name.lower() == b"content-type"]
    return head["status"] == 200 and len(kinds) == 1 and kinds[0].startswith(TEXT)
