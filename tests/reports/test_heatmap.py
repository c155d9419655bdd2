"""What the heat map is given, and its colours."""

import itertools
import math
import re
from importlib import resources

import numpy as np
import pytest
from synthetic_run import write_synthetic_run

from kleash.records import RunFolder
from kleash.reports import heatmap
from kleash.reports.heatmap import colour_thresholds, heat_map, read_sequences
from kleash.store.checksums import seal_folder

shown = np.vectorize(lambda value: float(f"{value:.3g}"))
KEYS = {"kl": "kl_policy_reference", "reverse": "kl_reference_policy", "rank": "rank_reference"}
KEYS |= {"entropy_p": "entropy_policy", "entropy_q": "entropy_reference", "position": "position"}
KEYS |= {name: name for name in ("jensen_shannon", "total_variation")}


def made(run):
    folder, measurement = RunFolder(run[0]), run[1]
    keys = [(drift.prompt_id, drift.sample_id) for drift in measurement.worst_sequences]
    return heat_map(folder, measurement, read_sequences(folder, keys))


def test_the_token_view_has_the_columns_of_the_files(run):
    folder, measurement = RunFolder(run[0]), run[1]
    heat = made(run)
    assert len(heat["sequences"]) == 50 and heat["shortened"] == 0
    upper_quartile = measurement.quantiles["kl_policy_reference"]["75"].value
    assert heat["thresholds"][0] == pytest.approx(upper_quartile, rel=0.05)
    prompts = {found.prompt_id: heatmap.make_visible(found.prompt) for found in measurement.prompts}
    names = ["prompt_id", "sample_id", "logp_policy", "logp_reference"]
    parts = list(folder.parts("tokens", [*names, *KEYS.values()]))
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for drawn, drift in zip(heat["sequences"], measurement.worst_sequences, strict=True):
        rows = (table["prompt_id"] == drift.prompt_id) & (table["sample_id"] == drift.sample_id)
        assert (drawn["prompt_id"], drawn["sample_id"]) == (drift.prompt_id, drift.sample_id)
        assert drawn["tokens"] == rows.sum() == drift.tokens
        for ours, theirs in KEYS.items():
            assert drawn[ours] == shown(table[theirs][rows]).tolist()
        assert drawn["p"] == shown(np.exp(table["logp_policy"][rows].astype(float))).tolist()
        assert drawn["q"] == shown(np.exp(table["logp_reference"][rows].astype(float))).tolist()
        assert (drawn["prompt"], drawn["total"]) == (prompts[drift.prompt_id], shown(drift.kl))


def test_the_token_view_has_the_alternatives_of_the_files(run):
    table = RunFolder(run[0]).alternatives()
    sequence = made(run)["sequences"][3]
    rows = (table["prompt_id"] == sequence["prompt_id"]) & (table["sample_id"] == sequence["sample_id"])
    rows = np.flatnonzero(rows & (table["position"] == 7))
    rows = rows[np.argsort(table["place"][rows])]
    assert len(rows) == 5
    for side, who in enumerate(("policy", "reference")):
        flat = sequence["alternatives"][7][side]
        texts = [sequence["texts"][index] for index in flat[0::2]]
        assert texts == [heatmap.make_visible(table[f"text_{who}"][row]) for row in rows]
        assert flat[1::2] == shown(table[f"probability_{who}"][rows]).tolist()
        assert flat[1] == max(flat[1::2])


def test_drawn_tokens_are_limited_and_shortened_sequences_counted(run, monkeypatch):
    monkeypatch.setattr(heatmap, "MAX_TOKENS_OF_SEQUENCE", 20)
    monkeypatch.setattr(heatmap, "MAX_TOKENS", 50)
    heat = made(run)
    assert [len(drawn["text"]) for drawn in heat["sequences"]] == [20, 20, 10]
    assert heat["shortened"] == 3
    assert [drawn["tokens"] for drawn in heat["sequences"]] == [d.tokens for d in run[1].worst_sequences[:3]]
    for drawn in heat["sequences"]:
        assert list(map(all, drawn["alternatives"])) == [True] * len(drawn["text"])


@pytest.mark.parametrize(("largest", "ordinary"), [(4.0, 0.2), (53.0, 1e-4), (4.1e-7, 1e-9), (0.9, 0.3)])
def test_colours_begin_at_the_upper_quartile_in_equal_ratios(largest, ordinary):
    steps = colour_thresholds(largest, ordinary)
    assert len(steps) == 8
    assert steps[0] == pytest.approx(ordinary, rel=0.05)
    ratio = (largest / ordinary) ** (1 / 8)
    assert steps[-1] * ratio == pytest.approx(largest, rel=0.06)
    assert all(after / before == pytest.approx(ratio, rel=0.1) for before, after in itertools.pairwise(steps))


@pytest.mark.parametrize("ordinary", [0.0, math.nan, math.inf, 1.0, 2.0])
def test_without_an_upper_quartile_each_colour_begins_at_a_third_of_the_next(ordinary):
    steps = colour_thresholds(1.0, ordinary)
    assert all(after / before == pytest.approx(3, rel=0.1) for before, after in itertools.pairwise(steps))
    assert steps[-1] == pytest.approx(1 / 3, rel=0.05)


def test_infinite_and_nan_kl_are_drawn(tmp_path):
    from pyarrow import array, float32, parquet

    folder = tmp_path / "run"
    measurement = write_synthetic_run(folder, prompts=2, samples=1, tokens=8, hostile=False, shards=1)
    path = folder / "tokens" / "part-00000.parquet"
    table = parquet.read_table(path)
    place = table.schema.get_field_index("kl_policy_reference")
    values = table.column(place).to_numpy().copy()
    values[:2] = [math.inf, math.nan]
    changed = table.set_column(place, table.schema.field(place), array(values, type=float32()))
    parquet.write_table(changed, path)
    seal_folder(folder)
    kls = [kl for drawn in made((folder, measurement))["sequences"] for kl in drawn["kl"]]
    assert sum(map(math.isinf, kls)) == sum(map(math.isnan, kls)) == 1


def luminance(colour, sight=None):
    """The relative luminance of a colour of six digits, as an eye of this matrix sees it."""
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    if sight is not None:
        linear = np.clip(np.array(sight) @ linear, 0, 1)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# Machado, Oliveira & Fernandes (2009), severity 1, on linear RGB.
PROTAN = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
DEUTAN = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
TRITAN = [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]


def themes():
    css = (resources.files("kleash.reports") / "assets" / "style.css").read_text(encoding="utf-8")
    light, dark = css.split("@media screen and (prefers-color-scheme: dark)")[:2]
    texts = {"light": light, "dark": dark[: dark.index("* {")]}
    return {name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text)) for name, text in texts.items()}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast_on_every_colour(theme):
    colours = themes()[theme]
    for step in range(1, 9):
        assert contrast(colours[f"heat-{step}"], colours[f"ink-{step}"]) >= 4.5
    for ground, ink in itertools.product(("paper", "raised", "sunk"), ("ink", "soft", "accent")):
        assert contrast(colours[ground], colours[ink]) >= 4.5


@pytest.mark.parametrize("sight", [None, PROTAN, DEUTAN, TRITAN])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_ordered_by_lightness_for_colour_blind_readers(theme, sight):
    """Lightness (CIE L*) falls in light mode and rises in dark mode, in steps that can be told apart."""
    colours = themes()[theme]
    lightness = [116 * luminance(colours[f"heat-{step}"], sight) ** (1 / 3) - 16 for step in range(1, 9)]
    steps = np.diff(lightness) * (-1 if theme == "light" else 1)
    assert steps.min() > 3.5
