"""A release of the chart beside the one that all other tests use: its operators serve only fleets labelled for them.

What happens to them is nothing to other fleets.
"""

import asyncio
from dataclasses import dataclass

from examples.demo.environment import ROOT, Images, run
from examples.demo.kubectl import kubectl


@dataclass(frozen=True)
class Release:
    """One that serves the fleets of its own namespace."""

    name: str
    namespace: str  # and the label's value of its fleets

    @property
    def deployment(self) -> str:
        """Of its operators, and their Lease."""
        return f"{self.name}-rollfleet-operator"

    @property
    def pods(self) -> str:
        """Selector of its operators."""
        return f"app.kubernetes.io/instance={self.name}"

    async def install(self, images: Images, replicas: int) -> None:
        """Until so many operators are there."""
        repository, _, tag = images.operator.rpartition(":")
        values = {
            "replicaCount": str(replicas),
            "operatorName": self.namespace,
            "watchNamespaces": f"{{{self.namespace}}}",
            "image.repository": repository,
            "image.tag": tag,
            "router.image": images.router,
            "hostPathVolumes.allowed": "true",
            "crds.enabled": "false",
            "rbac.aggregateToUserRoles": "false",
        }
        settings = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        place = ("--namespace", self.namespace, "--create-namespace", "--wait", "--timeout", "180s")
        chart = str(ROOT / "charts/rollfleet")
        await asyncio.to_thread(run, "helm", "upgrade", "--install", self.name, chart, *place, *settings)

    async def scale(self, replicas: int) -> None:
        """Until so many operators are there, and no others."""
        place = ("-n", self.namespace)
        await kubectl("scale", "deployment", self.deployment, *place, f"--replicas={replicas}")
        if replicas:
            await kubectl("rollout", "status", f"deployment/{self.deployment}", *place, "--timeout=55s")
        else:
            await kubectl("wait", "pods", *place, "-l", self.pods, "--for=delete", "--timeout=55s")

    async def uninstall(self) -> None:
        """Where it is there."""
        words = ("--namespace", self.namespace, "--ignore-not-found", "--wait", "--timeout", "60s")
        await asyncio.to_thread(run, "helm", "uninstall", self.name, *words)
