"""The CustomResourceDefinitions, from the models."""

from dataclasses import dataclass
from typing import Any

from rollfleet_operator.api.meta import GROUP, VERSION, ApiModel
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.rules import VALIDATIONS, Schema
from rollfleet_operator.api.structural import to_structural
from rollfleet_operator.api.weightversion import WeightVersion


@dataclass(frozen=True)
class Kind:
    """A kind of ours: its model, its names and how `kubectl get` prints it."""

    model: type[ApiModel]
    plural: str
    short_name: str
    columns: tuple[Schema, ...]
    scale: Schema | None = None

    @property
    def name(self) -> str:
        """CamelCase name of the kind."""
        return self.model.__name__

    @property
    def crd_name(self) -> str:
        """Name of the CustomResourceDefinition."""
        return f"{self.plural}.{GROUP}"


def _column(name: str, path: str, of: str = "string", *, wide: bool = False, about: str = "") -> Schema:
    column: Schema = {"name": name, "type": of, "jsonPath": path}
    if about:
        column["description"] = about
    if wide:
        column["priority"] = 1
    return column


_AGE = _column("Age", ".metadata.creationTimestamp", "date")
_AVAILABLE = '.status.conditions[?(@.type=="Available")]'
_ACTIVE = '.status.conditions[?(@.type=="Active")]'
_DEGRADED = '.status.conditions[?(@.type=="Degraded")]'
_ACCEPTED = '.status.conditions[?(@.type=="Accepted")]'

ROLLOUT_ENGINE = Kind(
    model=RolloutEngine,
    plural="rolloutengines",
    short_name="roe",
    columns=(
        _column("Mode", ".spec.mode"),
        _column("Desired", ".spec.replicas", "integer"),
        _column(
            "Serving", ".status.servingReplicas", "integer", about="Engines verified at the committed version, open."
        ),
        _column("Version", ".status.committed.version", "integer", about="Committed version of the weights."),
        _column("State", f"{_AVAILABLE}.reason", about="Reason of the condition Available."),
        _AGE,
        _column("Endpoint", ".status.endpoint", wide=True),
        _column("Message", f"{_AVAILABLE}.message", wide=True),
        _column("Trouble", f"{_DEGRADED}.message", wide=True, about="Engines that are not well, and the cure."),
    ),
    scale={
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    },
)
WEIGHT_VERSION = Kind(
    model=WeightVersion,
    plural="weightversions",
    short_name="wv",
    columns=(
        _column("Version", ".spec.version", "integer"),
        _column("Committed", ".status.committedVersion", "integer", about="Version that the fleet serves."),
        _column("Phase", ".status.phase"),
        _column("Engines", ".status.engines", about="Engines that hold this version, of all."),
        _column("Paused", ".status.pausedSeconds", about="Seconds that the fleet answered nothing."),
        _AGE,
        _column("Reason", f"{_ACTIVE}.reason", about="Reason of the condition Active."),
        _column("Message", f"{_ACTIVE}.message", about="What it waits for, does, or failed for."),
        _column("Fleet", ".spec.engineRef.name", wide=True),
        _column("Accepted", f"{_ACCEPTED}.reason", wide=True),
    ),
)
KINDS = (ROLLOUT_ENGINE, WEIGHT_VERSION)


def build_schema(kind: Kind) -> Schema:
    """openAPIV3Schema of a kind. Only spec has defaults: status says what somebody wrote."""
    whole = kind.model.model_json_schema(by_alias=True)
    parts, definitions = whole["properties"], whole["$defs"]
    schema: Schema = {
        "type": "object",
        "description": " ".join(whole["description"].split()),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": to_structural(parts["spec"], definitions, defaults=True, path="spec"),
            "status": to_structural(parts["status"], definitions, defaults=False, path="status"),
        },
    }
    if VALIDATIONS in whole:
        schema[VALIDATIONS] = whole[VALIDATIONS]
    return schema


def build_crd(kind: Kind) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind."""
    subresources: Schema = {"status": {}}
    if kind.scale:
        subresources["scale"] = kind.scale
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kind.crd_name},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short_name],
                "categories": [GROUP.split(".", maxsplit=1)[0]],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": build_schema(kind)},
                    "subresources": subresources,
                    "additionalPrinterColumns": list(kind.columns),
                }
            ],
        },
    }
