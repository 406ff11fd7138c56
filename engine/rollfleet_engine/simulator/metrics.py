"""Prometheus text of the series that autoscalers and dashboards read from vLLM, by the same names."""

from rollfleet_engine.simulator.core import Core


def render(core: Core, model: str) -> str:
    """All series, in the text format 0.0.4."""
    labels = f'engine="0",model_name="{model}"'
    counters = core.counters
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} {0 if core.paused else core.running}",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting{{{labels}}} {core.running if core.paused else 0}",
        "# TYPE vllm:prompt_tokens_total counter",
        f"vllm:prompt_tokens_total{{{labels}}} {counters.prompt_tokens}",
        "# TYPE vllm:generation_tokens_total counter",
        f"vllm:generation_tokens_total{{{labels}}} {counters.generated_tokens}",
        "# TYPE vllm:prefix_cache_hits_total counter",
        f"vllm:prefix_cache_hits_total{{{labels}}} {counters.cached_tokens}",
        "# TYPE vllm:request_success_total counter",
        *(
            f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}'
            for reason, count in sorted(counters.finished.items())
        ),
    ]
    return "\n".join(lines) + "\n"
