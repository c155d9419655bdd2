"""The anchors stand on the page as they stand in the table, and a measurement is compared with those of its kind."""

import math
from itertools import pairwise

import pytest
from documentation import ROOT
from synthetic_run import columns, measurement_of

from kleash.leash import best_of_n_bound
from kleash.records import Measurement, Number
from kleash.store.anchors import ANCHORS, scale_sentence
from kleash.store.statistics import label_of

PAGE = ROOT / "docs" / "explanation" / "kl.md"


def measured(nats, **job):
    """A measurement with 7 nats in one direction and ``nats`` in the one that anchors of its source have."""
    fields = vars(measurement_of(columns(2, 1, 8, 0, 0.1, False), 2, 1, 1, False))
    names = ("kl_policy_reference", "kl_reference_policy")
    name = names["text" in job]
    per_token = {
        each: Number(value=nats if each == name else 7.0, unit="nats", standard_error=0.1, ci95=(0.0, 9.0))
        for each in names
    }
    return Measurement(**{**fields, "per_token": per_token, "job": job})


@pytest.mark.parametrize("kind", ANCHORS)
def test_the_page_has_the_anchors_that_are_compared(kind):
    """A row of the page has the anchors of one kind of source, in rising order."""
    statistic, anchors = ANCHORS[kind]
    figures = "; ".join(f"**{nats:.3g}** {change}" for change, nats in anchors.items())
    assert f"| {label_of(statistic)} per token | {figures} |" in PAGE.read_text(encoding="utf-8")
    assert all(first < second for first, second in pairwise(anchors.values()))


def test_the_best_of_n_on_the_page_is_the_bound_of_the_package():
    page = PAGE.read_text(encoding="utf-8")
    for count in (4, 64):
        assert f"**{best_of_n_bound(count):.3g}** the best of {count} responses" in page


@pytest.mark.parametrize(
    ("job", "nats", "expected"),
    [
        ({"text": "t"}, 0.02, "KL(reference ‖ policy) per token is above 0.0127 (Llama 2 7B in Q4_K_M) and"),
        ({"text": "t"}, 0.0, "KL(reference ‖ policy) per token is below 0.000369 (Llama 2 7B in Q8_0);"),
        ({"text": "t"}, math.inf, "KL(reference ‖ policy) per token is above 0.445 (Llama 3 8B in Q2_K);"),
        ({"responses": "r"}, 0.6, "KL(policy ‖ reference) per token is above 0.556 (Qwen2.5-1.5B after SFT"),
        ({"prompts": "p"}, 0.1, "KL(policy ‖ reference) per token is above 0.0302 (the shipped reference"),
        ({}, 0.1, "KL(policy ‖ reference) per token is above 0.0302 (the shipped reference"),
    ],
)
def test_the_nearest_anchors_of_the_source_and_direction_are_named(job, nats, expected):
    assert scale_sentence(measured(nats, **job)).startswith(expected)


def test_there_is_no_scale_without_a_kl():
    assert scale_sentence(measured(math.nan)) == ""
    assert scale_sentence(Measurement(**{**vars(measured(1.0)), "per_token": {}})) == ""
