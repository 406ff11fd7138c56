"""vLLM's control routes, and those that generate in a way that is not simulated.

The guard lets nobody through to a control route; they are here so that it meets the same routes as with vLLM.
"""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollfleet_engine.simulator.core import Core
from rollfleet_engine.simulator.requests import RequestError

Handler = Callable[[Request], Awaitable[Response]]

# Of vLLM 0.27.1 started for generation with VLLM_SERVER_DEV_MODE=1, as it printed them.
NOT_SIMULATED = (
    ("POST", "/invocations"),
    ("POST", "/v1/chat/completions/batch"),
    ("POST", "/v1/chat/completions/derender"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions/derender"),
    ("POST", "/v1/completions/render"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("POST", "/generative_scoring"),
    ("POST", "/collective_rpc"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/start_weight_update"),
    ("POST", "/start_draft_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
    ("POST", "/update_weight_version"),
    ("POST", "/scale_elastic_ep"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/server_info"),
)


def native_routes(core: Core) -> dict[tuple[str, str], Handler]:
    """Handlers by method and path."""

    async def pause(request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "keep"):
            raise RequestError(400, "the simulator pauses in modes abort and keep only", param="query.mode")
        core.pause(mode)
        return JSONResponse({"status": "paused"})

    async def resume(request: Request) -> Response:
        core.resume()
        return JSONResponse({"status": "resumed"})

    async def abort(request: Request) -> Response:
        count = core.running
        core.abort_all()
        return JSONResponse({"status": "aborted", "aborted": count})

    async def reset_prefix_cache(request: Request) -> Response:
        return JSONResponse({"success": core.reset_prefix_cache()})

    simulated: dict[tuple[str, str], Handler] = {
        ("POST", "/pause"): pause,
        ("POST", "/resume"): resume,
        ("POST", "/abort_requests"): abort,
        ("POST", "/reset_prefix_cache"): reset_prefix_cache,
        ("POST", "/reset_mm_cache"): _nothing,
        ("POST", "/reset_encoder_cache"): _nothing,
        ("GET", "/is_paused"): _telling(lambda: {"is_paused": core.paused}),
        ("GET", "/is_sleeping"): _telling(lambda: {"is_sleeping": False}),
        ("POST", "/is_scaling_elastic_ep"): _telling(lambda: {"is_scaling_elastic_ep": False}),
        ("GET", "/get_world_size"): _telling(lambda: {"world_size": 1}),
        ("GET", "/weight_info"): _telling(lambda: {"weight_version": "default"}),
    }
    return simulated | dict.fromkeys(NOT_SIMULATED, _not_simulated)


def _telling(value: Callable[[], dict[str, object]]) -> Handler:
    async def tell(request: Request) -> Response:
        return JSONResponse(value())

    return tell


async def _nothing(request: Request) -> Response:
    return Response(status_code=200)


async def _not_simulated(request: Request) -> Response:
    raise RequestError(
        501, f"the simulator has no {request.url.path}: it is for fleets, not for models", "NotSupported"
    )
