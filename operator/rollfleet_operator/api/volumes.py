"""Volumes of an engine's pod. All of them are mounted read-only."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from rollfleet_operator.api.meta import ApiModel
from rollfleet_operator.api.rules import NAME_REF_SCHEMA, Schema, relative_path_rule, rule, rules, union_rule

_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_CLAIM: Schema = {
    "type": "object",
    "required": ["claimName"],
    "properties": {"claimName": {**_NAME, "description": "PersistentVolumeClaim in the same namespace."}},
}
_HOST_PATH: Schema = {
    "type": "object",
    "required": ["path"],
    "properties": {
        "path": {"type": "string", "pattern": "^/", "maxLength": 4096, "description": "Absolute directory on the node."}
    },
    "x-kubernetes-validations": [
        rule("!self.path.matches('(^|/)[.][.](/|$)')", 'hostPath.path must not hold a ".." segment', field=".path")
    ],
}
_CSI: Schema = {
    "type": "object",
    "required": ["driver"],
    "properties": {
        "driver": {**_NAME, "description": "Name of the CSI driver."},
        "fsType": {"type": "string", "maxLength": 64, "description": "File system to mount."},
        "volumeAttributes": {
            "type": "object",
            "maxProperties": 64,
            "additionalProperties": {"type": "string", "maxLength": 4096},
            "description": "The driver's own settings.",
        },
        "nodePublishSecretRef": {**NAME_REF_SCHEMA, "description": "Secret handed to the driver."},
    },
}

ClaimSource = Annotated[dict[str, str], WithJsonSchema(_CLAIM)]
HostPathSource = Annotated[dict[str, str], WithJsonSchema(_HOST_PATH)]
CsiSource = Annotated[dict[str, Any], WithJsonSchema(_CSI)]

# Where the pod's own volumes lie, and where a mount would break or take over the container.
_OWN_MOUNTS = "/((etc/|run/|opt/|var/lib/)?rollfleet|dev|proc|sys|var/run/secrets)"


class VolumeSource(
    ApiModel, json_schema_extra=rules(union_rule("a volume", "persistentVolumeClaim", "hostPath", "csi"))
):
    """Where a volume comes from: exactly one member. Always mounted read-only."""

    persistent_volume_claim: ClaimSource | None = None
    """A claim in the same namespace."""
    host_path: HostPathSource | None = None
    """A directory of the node. Accepted only where the operator was started with host paths allowed."""
    csi: CsiSource | None = None
    """An inline volume of a CSI driver."""


class ExtraVolume(ApiModel):
    """A further read-only volume."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=50)]
    """Name of the volume, unique in the list."""
    mount_path: Annotated[
        str,
        Field(
            pattern=r"^/[^\x00:]+$",
            max_length=1024,
            json_schema_extra=rules(
                rule(
                    "!self.matches('(^|/)[.]{1,2}(/|$)|//|/$')",
                    'mountPath must be absolute, without trailing "/", empty segments, "." or ".."',
                ),
                rule(
                    f"!self.matches('^{_OWN_MOUNTS}(/|$)|^/(etc|run|opt|var|var/run|var/lib)$')",
                    "mountPath must not cover or lie under /rollfleet, /etc/rollfleet, /run/rollfleet, /opt/rollfleet, "
                    "/var/lib/rollfleet, /dev, /proc, /sys or /var/run/secrets: these are the engine's own",
                ),
            ),
        ),
    ]
    """Absolute path inside the container, unique in the list."""
    source: VolumeSource
    """Where it comes from."""


class Volumes(ApiModel):
    """Read-only data of the engines."""

    model: VolumeSource
    """Holds model.path."""
    checkpoints: VolumeSource | None = None
    """Holds what WeightVersions name. Without it a fleet stays at version 0."""
    extra: Annotated[
        tuple[ExtraVolume, ...],
        Field(
            max_length=16,
            json_schema_extra=rules(
                rule(
                    "self.all(v, self.exists_one(w, w.mountPath == v.mountPath))",
                    "spec.volumes.extra: mountPath is used twice",
                ),
                x_kubernetes_list_type="map",
                x_kubernetes_list_map_keys=["name"],
            ),
        ),
    ] = ()
    """Further volumes."""


RELATIVE_PATH_PATTERN = r"^[^\x00-\x1f\x7f]+$"
ModelPath = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        pattern=RELATIVE_PATH_PATTERN,
        json_schema_extra=rules(relative_path_rule("spec.model.path", dot=True)),
    ),
]
CheckpointPath = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        pattern=RELATIVE_PATH_PATTERN,
        json_schema_extra=rules(relative_path_rule("spec.source.checkpoint.path")),
    ),
]
