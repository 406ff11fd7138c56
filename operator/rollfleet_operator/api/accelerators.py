"""What a spec may say of its NPUs, as CEL; the table of generations is the protocol's."""

from rollfleet_operator.api.rules import Schema, rule
from rollfleet_protocol.accelerators import (
    A3_MOST,
    ASCEND910,
    DEFAULT_RESOURCES,
    DETERMINISTIC,
    RESOURCES,
    AcceleratorProfile,
)


def resource_of(accelerator: str) -> str:
    """CEL: the extended resource, said or not."""
    by_profile = f"'{ASCEND910}'"
    for profile, name in DEFAULT_RESOURCES.items():
        if name != ASCEND910:
            by_profile = f"{accelerator}.profile == '{profile}' ? '{name}' : {by_profile}"
    unsaid = f"(has({accelerator}.profile) ? ({by_profile}) : '{ASCEND910}')"
    return f"(has({accelerator}.resourceName) ? {accelerator}.resourceName : {unsaid})"


def _in(profiles: tuple[AcceleratorProfile, ...]) -> str:
    return f"[{', '.join(repr(profile.value) for profile in profiles)}]"


def _profile_fits() -> str:
    """CEL: the profile is one that the resource's name may be of."""
    fits = "true"
    for prefix, profiles in reversed(RESOURCES):
        fits = f"self.resourceName.startsWith('{prefix}') ? self.profile in {_in(profiles)} : ({fits})"
    return fits


def accelerator_rules() -> tuple[Schema, ...]:
    """Of spec.accelerator. Its default {} is judged before the defaults of its own fields are filled in."""
    return (
        rule(
            "!has(self.profile) || !has(self.perPod) || self.perPod > 0",
            "spec.accelerator.profile needs spec.accelerator.perPod above 0",
            field=".profile",
        ),
        rule(
            f"!has(self.profile) || !has(self.resourceName) || ({_profile_fits()})",
            "spec.accelerator.resourceName is not of spec.accelerator.profile: leave it out, or correct one of them",
            field=".resourceName",
        ),
        rule(
            f"!(has(self.profile) && self.profile == 'A3' && {resource_of('self')} == '{ASCEND910}') || "
            f"self.perPod == 1 || (self.perPod % 2 == 0 && self.perPod <= {A3_MOST})",
            f"spec.accelerator.perPod of profile A3 must be 1 or an even number to {A3_MOST}",
            field=".perPod",
        ),
    )


def deterministic_rules() -> tuple[Schema, ...]:
    """Of the spec: what only some generations can do, by profile or, without one, by the resource's name."""
    others = [prefix for prefix, profiles in RESOURCES if not set(profiles) & set(DETERMINISTIC)]
    accelerator = "self.accelerator"
    named = " || ".join(f"{accelerator}.resourceName.startsWith('{prefix}')" for prefix in others)
    other = (
        f"(has({accelerator}.profile) ? !({accelerator}.profile in {_in(DETERMINISTIC)}) : "
        f"has({accelerator}.resourceName) && ({named}))"
    )
    return tuple(
        rule(
            f"!(self.rlConfig.enabled && self.rlConfig.{flag} && self.accelerator.perPod > 0 && {other})",
            f"spec.rlConfig.{flag} works on Atlas A2 and A3 only, and spec.accelerator is of another generation",
            field=f".rlConfig.{flag}",
        )
        for flag in ("enableBatchInvariant", "enableTrainingConsistency")
    )
