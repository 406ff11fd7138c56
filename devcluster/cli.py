"""The command line."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from devcluster import base, images, lifecycle, paths, prerequisites, status, supervisor
from devcluster.errors import DevclusterError, NotRunning
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


def environment_lines(where: paths.Paths, path: str) -> list[str]:
    """Exports for a shell. A kubectl of the machine must not come before ours, which has the server's version."""
    values = {
        "KUBECONFIG": str(where.kubeconfig),
        "PATH": f"{status.binaries_folder(where)}:{path}" if path else str(status.binaries_folder(where)),
        "DEVCLUSTER_BASE_IMAGE": base.base_image(),
    }
    return [f"export {name}={shlex.quote(value)}" for name, value in values.items()]


def _image(where: paths.Paths, arguments: argparse.Namespace) -> None:
    prerequisites.check_machine()
    with lifecycle.locked(where):
        lifecycle.build(where)
        context = (arguments.context or arguments.file.parent).resolve()
        volumes, build_args = tuple(arguments.volume), tuple(arguments.build_arg)
        wanted = images.Build(arguments.file.resolve(), arguments.tag, context, build_args, volumes)
        archive = images.build(where, wanted)
        if status.read(AddressPlan(), where).state == "Down":
            raise NotRunning(f"built, but there is no cluster to load it into: {archive}", "Run: python3 -m devcluster up")
        images.load(where, arguments.tag, archive)


def _status(where: paths.Paths, output: str) -> int:
    seen = status.read(AddressPlan(), where)
    print(json.dumps(seen.to_json(where), indent=1) if output == "json" else status.text(seen, where))
    return 0 if seen.state == "Up" else 1


def _env(where: paths.Paths, path: str) -> None:
    if not where.kubeconfig.exists():
        raise NotRunning("there is no cluster", "Run: python3 -m devcluster up")
    print("\n".join(environment_lines(where, path)))


def _build(where: paths.Paths) -> None:
    prerequisites.check_machine()
    with lifecycle.locked(where):
        lifecycle.build(where)


def _run(where: paths.Paths, arguments: argparse.Namespace, path: str) -> int:
    match arguments.command:
        case "build":
            _build(where)
        case "up":
            lifecycle.up(AddressPlan(), where)
        case "down":
            lifecycle.down(where)
        case "status":
            return _status(where, arguments.output)
        case "env":
            _env(where, path)
        case "images":
            print("\n".join(images.present(where)))
        case "image":
            _image(where, arguments)
        case "supervise":
            supervisor.main(where)
    return 0


def main(argv: Sequence[str], path: str) -> int:
    """Exit status 1 for what the user can cure, with the cure."""
    arguments = parser().parse_args(argv)
    try:
        return _run(paths.from_environment(), arguments, path)
    except DevclusterError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return 1
