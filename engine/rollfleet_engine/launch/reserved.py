"""Options that are not the user's to set, and why. The same for all releases that know them."""

from rollfleet_protocol.launch_variables import LOG_IS_READ, RANKS_OF_SPEC, Reserved

_OURS = "the launcher sets it"
_SPEC_MODEL = "it comes from spec.model"
_NODES = "nodes come from spec.parallelism.nodes"
_IN_FRONT = "it puts code or another address in front of the guard, which must see every request first"
_NO_GATE = "it starts servers that the guard does not stand in front of"
_RANKS = "workers come from spec.parallelism alone: an engine that has others takes no update"
_QUANTISED = (
    "NotSupported: weights quantised while loading cannot be updated and verified; "
    "a checkpoint that is stored quantised needs no flag"
)
# KVConnectorBase_V1.reset_cache answers None where a connector does not implement it, and the scheduler takes that for
# done (0.27.1, v1/core/sched/scheduler.py reset_connector_cache): a store would answer from KV of the old weights.
_OUTSIDE_CACHE = (
    "NotSupported: caches outside of the engine are not emptied by an update, and would answer for old weights"
)
_EXECUTOR = "NotSupported: workers are processes of the engine's pods, as vLLM starts them by itself (mp)"
_WORKER = "the worker extension applies, counts and digests weights; a replaced worker would not"


def _field(field: str, *options: str) -> tuple[Reserved, ...]:
    return tuple(Reserved(option, f"it comes from {field}") for option in options)


def _both_ways(option: str, *, field: str) -> tuple[Reserved, ...]:
    """A switch of argparse's BooleanOptionalAction, with its negation."""
    return _field(field, option, f"--no-{option.removeprefix('--')}")


RESERVED_OPTIONS = (
    Reserved("--middleware", _IN_FRONT),
    Reserved("--root-path", "it moves the paths by which the guard tells inference from control"),
    Reserved("--host", f"{_OURS} (bindAddress)"),
    Reserved("--port", f"{_OURS} (servingPort)"),
    Reserved("--uds", _IN_FRONT),
    Reserved("--ssl-*", "the serving port speaks plain HTTP inside the cluster; TLS is on the control port"),
    Reserved(
        "--enable-ssl-refresh", "the serving port speaks plain HTTP inside the cluster; TLS is on the control port"
    ),
    Reserved("--api-server-count", f"every API server process would have a gate of its own; {_OURS} to 1"),
    Reserved("-asc", f"every API server process would have a gate of its own; {_OURS} to 1"),
    Reserved("--headless", "an engine without an API server has no guard; more nodes come from spec.parallelism.nodes"),
    Reserved("--grpc", _NO_GATE),
    Reserved("--data-parallel-supervisor-port", _NO_GATE),
    Reserved("--data-parallel-multi-port-external-lb", _NO_GATE),
    Reserved("-dpm", _NO_GATE),
    Reserved("--data-parallel-external-lb", _NO_GATE),
    Reserved("-dpe", _NO_GATE),
    Reserved("--data-parallel-hybrid-lb", _NO_GATE),
    Reserved("-dph", _NO_GATE),
    *(Reserved(name, RANKS_OF_SPEC) for name in ("--data-parallel-size", "-dp")),
    *(
        Reserved(name, f"NotSupported: all data-parallel ranks are in one pod; {RANKS_OF_SPEC}")
        for name in (
            *("--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr"),
            *("--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa"),
        )
    ),
    *(Reserved(name, _NODES) for name in ("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port")),
    *_both_ways("--enable-sleep-mode", field="spec.sleepMode"),
    *_field("spec.parallelism.tensor", "--tensor-parallel-size", "-tp"),
    *_field("spec.parallelism.pipeline", "--pipeline-parallel-size", "-pp"),
    *_field("spec.parallelism.expert", "-ep"),
    *_both_ways("--enable-expert-parallel", field="spec.parallelism.expert"),
    *_field("spec.engine.additionalConfig and spec.rlConfig", "--additional-config"),
    *_field("spec.engine.compilationConfig", "--compilation-config", "-cc"),
    *_both_ways("--tokens-only", field="spec.features.tokenEndpoint"),
    *_both_ways("--enable-scale-out", field="spec.features.tokenEndpoint"),
    *_both_ways("--enable-return-routed-experts", field="spec.features.routedExperts"),
    *_field("spec.features.routedExperts", "--aux-output-config"),
    *_both_ways("--enable-trace-replay", field="spec.features.traceReplay"),
    *_both_ways("--enable-auto-tool-choice", field="spec.features.toolCalling"),
    *_field("spec.features.toolCalling.parser", "--tool-call-parser"),
    *_field("spec.features.logprobs", "--logprobs-mode", "--max-logprobs"),
    *(Reserved(name, _RANKS) for name in ("--prefill-context-parallel-size", "-pcp")),
    *(
        Reserved(name, _EXECUTOR, allowed=frozenset({"mp"}))
        for name in ("--distributed-executor-backend", "--data-parallel-backend", "-dpb")
    ),
    Reserved("--device-ids", "the device plugin chooses the NPUs, and the engine takes all of them"),
    Reserved("--enable-elastic-ep", "it changes the number of workers behind the guard's back"),
    Reserved("--worker-extension-cls", _WORKER),
    Reserved("--worker-cls", _WORKER),
    Reserved("--weight-transfer-config", f"{_OURS}: one composite transfer engine serves all sources"),
    Reserved("--config", "a file could hold any of the options that are refused here; write them as arguments"),
    Reserved("--model", _SPEC_MODEL),
    Reserved("--served-model-name", _SPEC_MODEL),
    Reserved("--runner", f"{_OURS}: a rollout engine generates"),
    Reserved("--convert", "a rollout engine generates; it is not converted to another task"),
    Reserved("--load-format", "weights are read from the safetensors files of spec.model"),
    Reserved("--revision", "spec.model.path is a folder; it has no revisions"),
    Reserved("--enable-lora", "NotSupported: adapters would answer under a weight version that does not name them"),
    Reserved("--lora-modules", "NotSupported: adapters would answer under a weight version that does not name them"),
    Reserved(
        "--default-mm-loras", "NotSupported: adapters would answer under a weight version that does not name them"
    ),
    *(Reserved(name, _QUANTISED) for name in ("--quantization", "-q")),
    Reserved("--quantization-config", _QUANTISED),
    *(Reserved(name, _OUTSIDE_CACHE) for name in ("--kv-transfer-config", "--ec-transfer-config")),
    Reserved("--kv-events-config", "it tells clients' tokens to whoever reaches its port"),
    Reserved("--grpc-port", _NO_GATE),
    Reserved("--scheduler-cls", "the guard pauses vLLM's own scheduler; a replaced one may run on"),
    *(
        Reserved(f"--{no}enable-{kind}-embeds", "it has the server load serialised tensors that clients send")
        for kind in ("prompt", "mm")
        for no in ("", "no-")
    ),
    Reserved("--uvicorn-log-level", LOG_IS_READ),
    Reserved("--disable-uvicorn-access-log", f"{_OURS}: the guard logs admissions"),
    Reserved("--no-disable-uvicorn-access-log", f"{_OURS}: the guard logs admissions"),
    Reserved("--log-config-file", LOG_IS_READ),
    Reserved("--logging-config", LOG_IS_READ),
    Reserved("--log-level", f"{LOG_IS_READ}; VLLM_LOGGING_LEVEL in spec.env may be DEBUG to ERROR"),
    Reserved("--help", "it prints and ends instead of serving"),
    Reserved("-h", "it prints and ends instead of serving"),
)

# Options that people look for and no release has.
UNKNOWN_OPTIONS = {
    "--dp-routing-config": "neither vLLM nor vLLM-Ascend has it: requests name a rank by X-data-parallel-rank, and "
    "spec.router spreads them over engines",
}
# Words that would be a subcommand of `vllm`; the server's own parser would take them for the model.
SUBCOMMANDS = {
    "router": "there is no `vllm serve router`: spec.router runs a router before the engines",
    "serve": "the launcher starts the server itself",
}
