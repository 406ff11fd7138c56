"""`make demo`: a real fleet on a local Kubernetes changes its weights under load, and every answer is checked."""

import argparse
import asyncio
import sys
import time
from typing import Any

from examples.demo import checks
from examples.demo.environment import Environment, SetupError, folders, known_outputs, prepare, step
from examples.demo.fleet import Fleet, timed_bump
from examples.demo.kubectl import KubectlError
from examples.demo.load import Load, Plan, completed
from examples.demo.manifests import SERVED_NAME

REPLICAS = 2
VERSIONS = (1, 2)
ANSWERS_EACH = 40  # whole answers of each version before the next bump


async def _show_progress(fleet: Fleet, version: int) -> None:
    """Print each phase of the update as the WeightVersion's status tells it."""
    shown = ""
    while True:
        document = await _status(fleet)
        phase, engines = document.get("phase", ""), document.get("engines", "")
        line = f"{phase} {engines}".strip() if document.get("version") == version else ""
        if line and line != shown:
            print(f"    version {version}: {line}", flush=True)
            shown = line
        await asyncio.sleep(0.1)


async def _status(fleet: Fleet) -> dict[str, Any]:
    from examples.demo.kubectl import get  # noqa: PLC0415 - one name, used here only

    try:
        document = await get("weightversion", fleet.weight_version, fleet.namespace)
    except KubectlError:
        return {}
    return document.get("status") or {}


async def _enough(load: Load, version: int) -> None:
    deadline = time.monotonic() + 120
    while completed(load.samples, version) < ANSWERS_EACH:
        if time.monotonic() > deadline:
            raise TimeoutError(f"fewer than {ANSWERS_EACH} answers of version {version} within 120 s")
        await asyncio.sleep(0.1)


async def _updates(fleet: Fleet, environment: Environment, load: Load) -> list[str]:
    lines = []
    paths = [folder.name for folder in folders(environment.models.real)]
    await _enough(load, 0)
    for version in VERSIONS:
        progress = asyncio.create_task(_show_progress(fleet, version))
        try:
            update = await timed_bump(fleet, version, paths[version])
        finally:
            progress.cancel()
        status = update.document["status"]
        await _enough(load, version)
        lines.append(
            f"version {version}: Active {update.seconds:.2f} s after the bump, paused for {status['pausedSeconds']} s, "
            f"digest {status['digest'][:23]}..."
        )
        print(f"    {lines[-1]}", flush=True)
    return lines


def _report(load: Load, problems: list[str], lines: list[str]) -> None:
    refused = sum(sample.status == 503 for sample in load.samples)
    aborted = sum(sample.finish_reason == "abort" for sample in load.samples)
    print("\nwhat was seen")
    for line in lines:
        print(f"  {line}")
    for version in (0, *VERSIONS):
        print(f"  whole answers of version {version}: {completed(load.samples, version)}")
    print(f"  refused with 503 and Retry-After: {refused}; cut short by an update, as a strict prefix: {aborted}")
    if problems:
        print("\nNOT proved:")
        for problem in problems[:20]:
            print(f"  {problem}")
        return
    print(
        "\nproved: every answer is what the version it names gives, no engine admitted an old version after the first\n"
        "of the new, and clients saw nothing but answers and 503 with Retry-After."
    )


async def demo(environment: Environment, *, keep: bool) -> int:
    """Run it; exit status 1 where a promise did not hold."""
    fleet = Fleet("qwen", "rollfleet-demo")
    known = known_outputs(environment.models.real)
    told = f"a minute or more; kubectl get roe,pods -n {fleet.namespace} shows it"
    with step(f"starting {REPLICAS} real vLLM engines and their router ({told})"):
        await fleet.create(environment.real(), REPLICAS)
        await fleet.serving(REPLICAS)
    pods = [pod["metadata"]["name"] for pod in await fleet.pods()]
    print("load through the router, and two updates under it", flush=True)
    plan = Plan(await fleet.url(), SERVED_NAME, tuple(known[0]))
    async with Load(plan) as load:
        lines = await _updates(fleet, environment, load)
    problems = checks.wrong_answers(load.samples, known) + checks.stale_answers(load.samples)
    problems += [f"{count} x {what}" for what, count in checks.bad_refusals(load.samples).items()]
    problems += checks.overlapping_versions(await fleet.gate_changes(pods))
    _report(load, problems, lines)
    if keep:
        print(f"\nkept: kubectl get roe,wv -n {fleet.namespace}; kubectl delete namespace {fleet.namespace} removes it")
    else:
        with step("removing the fleet"):
            await fleet.delete()
    print(
        "\ncluster, operator and images stay: docs/try.md goes on with a simulated fleet, make down removes all of it"
    )
    return 1 if problems else 0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the fleet there at the end")
    arguments = parser.parse_args()
    try:
        environment = prepare()
        return asyncio.run(demo(environment, keep=arguments.keep))
    except (SetupError, KubectlError, TimeoutError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
