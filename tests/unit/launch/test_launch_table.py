"""Every row of the seed document's checklist has a field, and the page says how each release is told."""

from pathlib import Path

import pytest

from devtools.launch_table import COLUMNS, PAGE, SEED, cell, render
from rollfleet_engine.launch.dialects import CPU, DIALECTS, dialect_of
from rollfleet_engine.launch.words import Feature
from rollfleet_operator.api.crd import ROLLOUT_ENGINE, build_schema

CHECKLIST = Path(__file__).with_name("seed-checklist.txt")
ROOT = Path(__file__).parents[3]
SETTINGS = [line for line in CHECKLIST.read_text().splitlines() if not line.startswith("#")]


def schema_of(field: str) -> dict | None:
    """The node of the CRD that a field's path leads to."""
    node = build_schema(ROLLOUT_ENGINE)
    for part in ("properties", *".properties.".join(field.split(".")).split(".")):
        node = node.get(part)
        if node is None:
            return None
    return node


def test_the_checklist_is_whole():
    assert len(SETTINGS) == len(set(SETTINGS)) == 12
    assert [row.setting for row in SEED] == SETTINGS


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_row_of_the_checklist_has_a_field_that_exists(setting):
    (row,) = (each for each in SEED if each.setting == setting)
    field, _, value = row.feature.value.partition(" ")
    node = schema_of(field)
    assert node is not None, f"{setting}: the CRD has no {field}"
    assert not value or value in node["enum"]
    told = [cell(row.feature, dialect_of(release), platform) for _, release, platform in COLUMNS]
    assert not all(text.startswith("no: ") for text in told)


@pytest.mark.parametrize("feature", Feature)
def test_every_feature_is_a_field_that_exists(feature):
    field, _, value = feature.value.partition(" ")
    node = schema_of(field)
    assert node is not None
    assert not value or feature is Feature.FOLLOWS or value in node["enum"]


# Rows whose spelling is the composite engine's own, or rl_config's where there is one.
@pytest.mark.parametrize("setting", [each for each in SETTINGS if each.startswith(("--enable", "VLLM_"))])
def test_the_seed_s_own_spelling_is_one_that_some_release_is_told(setting):
    (row,) = (each for each in SEED if each.setting == setting)
    told = " ".join(cell(row.feature, dialect_of(release), platform) for _, release, platform in COLUMNS)
    assert f"`{setting}`" in told


@pytest.mark.parametrize("setting", [each for each in SETTINGS if each.startswith("rl_config.")])
def test_rl_config_s_own_keys_are_said_where_it_exists(setting):
    (row,) = (each for each in SEED if each.setting == setting)
    key = setting.removeprefix("rl_config.").removesuffix("=true")
    told = [cell(row.feature, dialect_of(release), platform) for head, release, platform in COLUMNS if "main" in head]
    assert all(f'"rl_config": {{"{key}": true}}' in text for text in told)


def test_a_cpu_is_never_told_to_unpickle():
    (column,) = ((dialect_of(release), platform) for _, release, platform in COLUMNS if platform is CPU)
    assert cell(Feature.INSECURE_SERIALIZATION, *column).startswith("no: ")


def test_every_spoken_range_has_a_column():
    shown = [dialect_of(release) for _, release, _ in COLUMNS]
    assert all(dialect in shown for dialect in DIALECTS)
    assert None not in shown


def test_the_page_is_as_it_would_be_made():
    assert (ROOT / PAGE).read_text() == render()
