"""Prometheus text of the series that autoscalers and dashboards read from vLLM, by the same names."""

from collections.abc import Iterator

from rollfleet_engine.simulator.core import Core


def render(core: Core, model: str) -> str:
    """All series, in the text format 0.0.4; one label value per data-parallel rank, as in vLLM."""
    return "\n".join(_lines(core, model)) + "\n"


def _lines(core: Core, model: str) -> Iterator[str]:
    labels = [f'engine="{rank}",model_name="{model}"' for rank in range(core.ranks)]
    running = [core.running_on(rank) for rank in range(core.ranks)]
    series: dict[str, list[int]] = {
        "vllm:num_requests_running gauge": [0 if core.paused else count for count in running],
        "vllm:num_requests_waiting gauge": [count if core.paused else 0 for count in running],
        "vllm:prompt_tokens_total counter": [each.prompt_tokens for each in core.counters],
        "vllm:generation_tokens_total counter": [each.generated_tokens for each in core.counters],
        "vllm:prefix_cache_hits_total counter": [each.cached_tokens for each in core.counters],
    }
    for title, values in series.items():
        yield f"# TYPE {title}"
        name = title.split()[0]
        yield from (f"{name}{{{of}}} {value}" for of, value in zip(labels, values, strict=True))
    yield "# TYPE vllm:request_success_total counter"
    for of, counters in zip(labels, core.counters, strict=True):
        for reason, count in sorted(counters.finished.items()):
            yield f'vllm:request_success_total{{{of},finished_reason="{reason}"}} {count}'
