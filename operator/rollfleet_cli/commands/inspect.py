"""plan, diagnose, verify: a look at the engines themselves. They write nothing, and ask as the operator would."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rollfleet_cli.cluster import Access, Cluster
from rollfleet_cli.commands.options import Context, Fleet, Kubeconfig, Namespace, Output, Via, Within
from rollfleet_cli.commands.output import console, print_json
from rollfleet_cli.errors import DisagreementError, ForbiddenError

if TYPE_CHECKING:
    from rollfleet_cli.asking import Answer

ANSWERS_S = 20.0
LOOKS = 3  # where updates are committed meanwhile
PROBES_S = 60.0  # a probe waits its turn among the requests that an engine serves


def plan(
    name: Fleet,
    namespace: Namespace = None,
    timeout: Within = ANSWERS_S,
    via: Via = "auto",
    output: Output = "table",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show what the operator would do now, and why. Writes nothing."""
    from rollfleet_cli.planning import Seen, foresee  # noqa: PLC0415 - half a second, not for --help
    from rollfleet_cli.render_inspect import render_plan  # noqa: PLC0415
    from rollfleet_cli.snapshot import ask_states, children, engine_pods, node_reader  # noqa: PLC0415

    access = Access(kubeconfig, context)
    cluster = Cluster(access)
    where = namespace or cluster.namespace
    fleet = cluster.fleet(where, name)
    versions = tuple(each for each in cluster.versions(where) if each.spec.engine_ref.name == name)
    pods = engine_pods(cluster, fleet)
    answers = ask_states(access, fleet, pods, timeout, via)
    refuse_if_denied(answers)
    live, closed = children(cluster, fleet)
    now = datetime.now(UTC)
    planned = foresee(Seen(fleet, versions, pods, answers, live, closed, now, node_reader(cluster)))
    if output == "json":
        print_json(planned.to_json())
    else:
        console().print(render_plan(f"{where}/{name}", planned, now))


def diagnose(
    name: Fleet,
    namespace: Namespace = None,
    timeout: Within = ANSWERS_S,
    via: Via = "auto",
    output: Output = "table",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show state, the engines' own answers, pods and events, then what is wrong, why, and what helps."""
    from rollfleet_cli.diagnosing import diagnose as judge  # noqa: PLC0415
    from rollfleet_cli.render_inspect import diagnosis_json, render_diagnosis  # noqa: PLC0415
    from rollfleet_cli.snapshot import collect  # noqa: PLC0415

    snapshot = collect(Access(kubeconfig, context), namespace, name, timeout, via)
    findings = judge(snapshot)
    if output == "json":
        print_json(diagnosis_json(snapshot, findings))
    else:
        console().print(render_diagnosis(snapshot, findings))


def verify(
    name: Fleet,
    namespace: Namespace = None,
    timeout: Within = PROBES_S,
    via: Via = "auto",
    output: Output = "table",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Ask every engine for its digest and a fresh probe, and compare; exit code 1 where one differs or is silent."""
    from rollfleet_cli.asking import ask  # noqa: PLC0415
    from rollfleet_cli.bumping import look_at  # noqa: PLC0415
    from rollfleet_cli.probing import fresh_probe  # noqa: PLC0415
    from rollfleet_cli.render_inspect import render_verification  # noqa: PLC0415
    from rollfleet_cli.snapshot import engine_pods, leading  # noqa: PLC0415
    from rollfleet_cli.verifying import probe_of  # noqa: PLC0415
    from rollfleet_cli.verifying import verify as judge  # noqa: PLC0415

    access = Access(kubeconfig, context)
    cluster = Cluster(access)
    where = namespace or cluster.namespace
    scene = look_at(cluster, where, name)
    for _ in range(LOOKS):
        before, probe = scene.committed, probe_of(scene.charge)
        pods = leading(engine_pods(cluster, scene.fleet))
        pods = tuple(pod for pod in pods if not pod["metadata"].get("deletionTimestamp"))
        answers = ask(access, scene.fleet, pods, fresh_probe(probe.tokens, timeout), timeout, via)
        refuse_if_denied(answers)
        scene = look_at(cluster, where, name)
        if scene.committed == before:
            break  # else an update was committed meanwhile: some answered before it and some after
    found = judge(scene.fleet, probe, tuple(answers))
    if output == "json":
        print_json(found.to_json())
    else:
        console().print(render_verification(scene.place, found))
    if not found.holds:
        raise DisagreementError(f"{scene.place}: {found.words}")


def refuse_if_denied(answers: "Sequence[Answer[Any]]") -> None:
    """Without a token nobody can be asked, and a plan or a comparison would be made up."""
    from rollfleet_cli.asking import RIGHT  # noqa: PLC0415

    denied = next((answer for answer in answers if answer.denied), None)
    if denied is not None:
        raise ForbiddenError(f"{denied.error}. {RIGHT}")
