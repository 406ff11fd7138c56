"""How an engine names its release: vLLM's, and that of vLLM-Ascend where it is there. Imports neither.

Both decide which endpoints and arguments of the transfer API there are (C23), so both are told where one lacks it.
"""

from importlib.metadata import PackageNotFoundError, version

PLUGIN = "vllm-ascend"


def told(vllm_release: str) -> str:
    """For people: 0.27.1, or "0.23.0 with vllm-ascend 0.23.0"."""
    try:
        return f"{vllm_release} with {PLUGIN} {version(PLUGIN)}"
    except PackageNotFoundError:
        return vllm_release
