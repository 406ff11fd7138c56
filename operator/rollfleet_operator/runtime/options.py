"""The command line of the operator's process."""

import argparse
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollfleet_operator.api.meta import LABEL_OPERATOR

DEFAULT_LISTEN = "0.0.0.0:8080"
DEFAULT_RESYNC_S = 180
SHORTEST_RESYNC_S = 1


@dataclass(frozen=True)
class Options:
    """What the operator was started with."""

    namespaces: tuple[str, ...]  # empty: all
    operator_namespace: str
    service_account: str
    router_image: str
    allow_host_path: bool
    listen_host: str
    listen_port: int
    kubeconfig: Path | None
    log_level: str
    resync_s: int = DEFAULT_RESYNC_S
    name: str = ""
    lease: str = ""  # of the election among replicas; empty: this process is the only one
    identity: str = ""  # in it
    operator_pods: tuple[tuple[str, str], ...] = ()  # labels of our own pods; none: no NetworkPolicies are made


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line; ends the process with a message where they are wrong."""
    parser = _parser()
    given = parser.parse_args(arguments)
    host, _, port = given.listen.rpartition(":")
    if not host or not port.isdecimal():
        parser.error(f"--listen {given.listen}: expected HOST:PORT")
    if given.resync_seconds < SHORTEST_RESYNC_S:
        parser.error(f"--resync-seconds {given.resync_seconds}: at least {SHORTEST_RESYNC_S}")
    for name in ("operator_namespace", "service_account"):
        if not getattr(given, name):
            parser.error(f"--{name.replace('_', '-')} is missing")
    return Options(
        namespaces=tuple(dict.fromkeys(given.namespace or ())),
        operator_namespace=given.operator_namespace,
        service_account=given.service_account,
        router_image=given.router_image,
        allow_host_path=given.allow_host_path,
        listen_host=host.strip("[]"),
        listen_port=int(port),
        kubeconfig=given.kubeconfig,
        log_level=given.log_level,
        resync_s=given.resync_seconds,
        name=given.operator_name,
        lease=given.lease,
        operator_pods=tuple(sorted(dict(given.operator_pod or ()).items())),
        identity=given.identity or f"{socket.gethostname()}-{secrets.token_hex(4)}",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollfleet-operator", description="Operates fleets of rollout engines.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--namespace", action="append", metavar="NS", help="serve this namespace; may be repeated")
    where.add_argument("--all-namespaces", action="store_true", help="serve the whole cluster (needs a ClusterRole)")
    _add_identity(parser)
    _add_fleets(parser)
    _add_election(parser)
    parser.add_argument(
        "--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help="for /healthz, /readyz and /metrics"
    )
    parser.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", help="run outside of the cluster, with these credentials"
    )
    parser.add_argument(
        "--resync-seconds", type=int, default=DEFAULT_RESYNC_S, metavar="N",
        help="how often everything is read by list, besides the watches (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def _add_identity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--operator-namespace", default=os.environ.get("POD_NAMESPACE", ""), metavar="NS",
        help="where the CA's Secret and our ServiceAccount are (default: $POD_NAMESPACE)",
    )  # fmt: skip
    parser.add_argument(
        "--service-account", default=os.environ.get("SERVICE_ACCOUNT_NAME", ""), metavar="NAME",
        help="our own ServiceAccount: the identity that guards obey (default: $SERVICE_ACCOUNT_NAME)",
    )  # fmt: skip
    parser.add_argument(
        "--operator-pod", action="append", type=_label, metavar="LABEL=VALUE",
        help="a label of this operator's own pods; may be repeated. With it each fleet gets a NetworkPolicy that lets "
        "only pods with all of these labels, in the operator's namespace, reach the control port of its engines",
    )  # fmt: skip


def _add_fleets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router-image", required=True, metavar="IMAGE", help="image of routers where a fleet names none"
    )
    parser.add_argument("--allow-host-path", action="store_true", help="accept fleets whose volumes are hostPath")
    parser.add_argument(
        "--operator-name", default="", metavar="NAME",
        help=f"serve only fleets with the label {LABEL_OPERATOR}=NAME (default: only fleets without that label)",
    )  # fmt: skip


def _add_election(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lease", default="", metavar="NAME",
        help="act only while holding this Lease of the operator's namespace (default: none, for a process that is the "
        "only one)",
    )  # fmt: skip
    parser.add_argument(
        "--identity", default=os.environ.get("POD_UID", ""), metavar="TEXT",
        help="how the Lease names this process; one that is started again under the same identity need not wait, so it "
        "must be nobody else's (default: $POD_UID, else one made up)",
    )  # fmt: skip


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=VALUE")
    return key, value
