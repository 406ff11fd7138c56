"""The command line."""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from devcluster import base, images, lifecycle, paths, prerequisites, status, supervisor
from devcluster.errors import DevclusterError, NotRunningError
from devcluster.network import AddressPlan


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="devcluster", description="A real Kubernetes on this machine, for development.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build", help="make programs and base images, without starting anything")
    commands.add_parser("up", help="start the cluster; one that is well is left alone")
    commands.add_parser("down", help="remove the cluster and all that it put on the machine")
    shown = commands.add_parser("status", help="show what runs; exit status 1 unless the cluster is up")
    shown.add_argument("-o", "--output", choices=("text", "json"), default="text")
    commands.add_parser("env", help='print exports for a shell: eval "$(python3 -m devcluster env)"')
    commands.add_parser("images", help="list the images in the cluster")
    image = commands.add_parser("image", help="build an image from a Dockerfile and load it into the cluster")
    image.add_argument("--file", type=Path, required=True, metavar="DOCKERFILE")
    image.add_argument("--tag", required=True, metavar="NAME:TAG")
    image.add_argument("--context", type=Path, help="default: the Dockerfile's folder")
    image.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    image.add_argument("--volume", action="append", default=[], metavar="HOST:PATH[:ro]", help="seen by RUN steps only")
    commands.add_parser("supervise")  # what `up` starts in the background
    return top


def environment_lines(where: paths.Paths, environment: Mapping[str, str]) -> list[str]:
    """Exports for a shell. A kubectl of the machine must not come before ours, which has the server's version."""
    binaries = str(status.binaries_folder(where))
    path = [word for word in environment.get("PATH", "").split(":") if word and word != binaries]
    values = {
        "KUBECONFIG": str(where.kubeconfig),
        "PATH": ":".join([binaries, *path]),
        "DEVCLUSTER_BASE_IMAGE": base.base_image(),
    }
    if any(name.lower() in {"http_proxy", "https_proxy", "all_proxy"} for name in environment):
        values["NO_PROXY"] = supervisor.no_proxy(environment)
    return [f"export {name}={shlex.quote(value)}" for name, value in values.items()]


def _image(where: paths.Paths, arguments: argparse.Namespace) -> None:
    context = (arguments.context or arguments.file.parent).resolve()
    volumes, build_args = tuple(arguments.volume), tuple(arguments.build_arg)
    wanted = images.Build(arguments.file.resolve(), arguments.tag, context, build_args, volumes)
    lifecycle.image(AddressPlan(), where, wanted)


def _status(where: paths.Paths, output: str) -> int:
    prerequisites.check_machine()
    seen = status.read(AddressPlan(), where)
    print(json.dumps(seen.to_json(where), indent=1) if output == "json" else status.text(seen, where))
    return 0 if seen.state == "Up" else 1


def _env(where: paths.Paths, environment: Mapping[str, str]) -> None:
    if not where.kubeconfig.exists():
        raise NotRunningError("there is no cluster", "Run: python3 -m devcluster up")
    print("\n".join(environment_lines(where, environment)))


def _run(where: paths.Paths, arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    match arguments.command:
        case "build":
            lifecycle.build(where)
        case "up":
            lifecycle.up(AddressPlan(), where)
        case "down":
            lifecycle.down(where)
        case "status":
            return _status(where, arguments.output)
        case "env":
            _env(where, environment)
        case "images":
            prerequisites.check_machine()
            print("\n".join(images.present(where)))
        case "image":
            _image(where, arguments)
        case "supervise":
            supervisor.main(where)
    return 0


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Exit status 1 for what the user can cure, with the cure."""
    arguments = parser().parse_args(argv)
    try:
        return _run(paths.from_environment(environment), arguments, environment)
    except DevclusterError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return 1
