"""Names and shapes shared by both kinds: group, labels, metadata, conditions."""

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "rollfleet.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
FIELD_MANAGER = "rollfleet"

LABEL_FLEET = f"{GROUP}/fleet"  # name of the RolloutEngine, on every child
LABEL_ENGINE = f"{GROUP}/engine"  # ordinal of the engine, on its pods
LABEL_NODE = f"{GROUP}/node"  # on pods of an engine of several that do not lead it: which one, from 1
LABEL_SERVING = f"{GROUP}/serving"  # "true" on members of the serving set: what the router selects
LABEL_COMPONENT = f"{GROUP}/component"  # engine | router
LABEL_OPERATOR = f"{GROUP}/operator"  # on a RolloutEngine: the one operator that serves it, where there are several
LABEL_TRAINER = f"{GROUP}/trainer"  # on a trainer's pods: the fleet that they may push to, see spec.trainers
ANNOTATION_FENCED = f"{GROUP}/fenced"  # on a RolloutEngine: uids of vanished pods that a person says do not run
ANNOTATION_STOPPED = f"{GROUP}/stopped"  # on a pod: why the operator has stopped it; it stays for diagnosis
ANNOTATION_LEADER = f"{GROUP}/leader"  # on the same pods: name of the pod that leads
ANNOTATION_TEMPLATE = f"{GROUP}/template-hash"  # which template the pod was made from

# Names of engines' pods after their fleet's: ordinal, node of the engine, suffix. Names can't be tampered with.
POD_NAME = re.compile(r"(?P<fleet>.+)-(?P<ordinal>[0-9]{1,9})-(?P<node>[0-9]{1,2})-[a-z0-9]+")
NO_ORDINAL = -1  # of a pod whose label was tampered with
MAX_DIGITS = 9  # of an ordinal: as many as a status can hold
MAX_MESSAGE = 1024  # characters of a condition's message


class ApiModel(BaseModel):
    """A part of an object: frozen, camelCase in JSON, unknown fields ignored (the API server has judged them).

    A docstring below a field is its description in the CRD, in `kubectl explain` and in docs/api.md.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True
    )

    def dump(self) -> dict[str, Any]:
        """The JSON form, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ConditionStatus(StrEnum):
    """metav1.ConditionStatus."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    """Name of the condition, in CamelCase; one entry of each."""
    status: ConditionStatus
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """Machine-readable cause, in CamelCase."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """The cause for a person, with the other side's own text and the remedy."""
    last_transition_time: datetime
    """When status changed last."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """metadata.generation that was judged."""


class ObjectMeta(ApiModel):
    """The part of metav1.ObjectMeta that is read."""

    name: str
    namespace: str
    uid: str = ""
    generation: int = 0
    annotations: dict[str, str] = Field(default_factory=dict)
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


ServiceAccountName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")]
Conditions = Annotated[
    tuple[Condition, ...],
    Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
]


def node_of(pod_name: str) -> int:
    """Which pod of its engine this one is: 0 leads, and has the guard."""
    found = POD_NAME.fullmatch(pod_name)
    return int(found["node"]) if found else 0


def ordinal_of(labels: dict[str, str]) -> int:
    """The engine's place in its fleet by its pod's label; NO_ORDINAL where somebody wrote something else into it."""
    text = labels.get(LABEL_ENGINE, "")
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else NO_ORDINAL
