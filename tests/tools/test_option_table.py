"""The table of option names in docs/train.md agrees with kleash's jobs and the installed frameworks."""

import dataclasses
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from make_option_table import OPTIONS, PAGE, page

from kleash.records import PPOJob


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python tools/make_option_table.py"


def test_every_row_is_an_option_of_ppo_and_stands_once() -> None:
    options = [names.option for names in OPTIONS]
    assert set(options) <= {field.name for field in dataclasses.fields(PPOJob)}
    assert len(options) == len(set(options))


@pytest.mark.peers("trl")
def test_trl_has_these_fields() -> None:
    trl = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert {names.trl for names in OPTIONS if names.trl} <= fields


@pytest.mark.peers("verl")
def test_verl_has_these_settings() -> None:
    yaml = pytest.importorskip("yaml")
    assert find_spec("verl") is not None
    source = files("verl") / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    configuration = yaml.safe_load(source.read_text(encoding="utf-8"))
    for names in OPTIONS:
        section: Any = configuration
        for part in () if names.verl is None else names.verl.split("."):
            assert isinstance(section, Mapping) and part in section, names
            section = section[part]


@pytest.mark.peers("openrlhf")
def test_openrlhf_has_these_options() -> None:
    spec = find_spec("openrlhf")  # importing its command needs vLLM
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "cli" / "train_ppo_ray.py").read_text(encoding="utf-8")
    plain = set(re.findall(r'"--([\w.]+)"', source))
    of_each_optimiser = set(re.findall(r'f"--\{prefix\}\.([\w.]+)"', source))
    for names in OPTIONS:
        if names.openrlhf is not None:
            assert names.openrlhf in plain or names.openrlhf.partition(".")[2] in of_each_optimiser, names
