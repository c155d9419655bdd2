"""The doctor on more tokens than it examines, on networks more exact than --rounding, and its ratio of temperatures."""

import re
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from kleash.diagnosis import RolloutRecord, diagnose
from kleash.diagnosis.token_table import sample_rollouts

RESPONSES, TIME, VOCAB = 20, 30, 60
Array = np.ndarray


def rollouts_of(trainer: Array, engine: Array, length: int = TIME) -> list[RolloutRecord]:
    return [
        RolloutRecord(
            prompt_ids=(number,),
            response_ids=tuple(range(length)),
            trainer=trainer[start : start + length],
            engine=engine[start : start + length],
            reference=None,
            is_counted=np.ones(length, dtype=bool),
            location=f"response {number}",
        )
        for number, start in enumerate(range(0, len(trainer), length))
    ]


def drawn_columns(random: np.random.Generator, temperature: float = 1.0) -> tuple[Array, Array]:
    """Log-probabilities of tokens drawn at a temperature, at temperature 1 and at that temperature."""
    logits = 3 * random.standard_normal((RESPONSES * TIME, VOCAB))
    tokens = (logits / temperature + random.gumbel(size=logits.shape)).argmax(-1)[:, None]
    plain, divided = (
        np.take_along_axis(log_softmax(values, axis=-1), tokens, axis=1)[:, 0]
        for values in (logits, logits / temperature)
    )
    return plain, divided


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.4])
@pytest.mark.parametrize("is_of_trainer", [False, True])
def test_the_ratio_of_temperatures_is_named_without_models(temperature: float, is_of_trainer: bool) -> None:
    plain, divided = drawn_columns(np.random.default_rng(4), temperature)
    columns = (divided, plain) if is_of_trainer else (plain, divided)
    finding = diagnose(rollouts_of(*columns)).findings[0]
    assert finding.cause == "temperature"
    sharper = ("trainer", "engine")[(temperature < 1) ^ is_of_trainer]
    (ratio,) = re.findall(rf"the {sharper} is the sharper one, as at about ([\d.]+) times", finding.evidence)
    assert float(ratio) == pytest.approx(min(temperature, 1 / temperature), rel=0.2)


@pytest.mark.parametrize(
    ("cause", "share", "size"), [("tensor_parallel", 0.005, 20.0), ("routing", 0.05, 0.5)]
)
def test_errors_of_some_tokens_are_named_where_the_others_round_far_less(
    cause: str, share: float, size: float
) -> None:
    """As of two networks in float32, where --rounding says bfloat16."""
    random = np.random.default_rng(5)
    engine, _ = drawn_columns(random)
    is_faulty = random.random(len(engine)) < share
    assert is_faulty.sum() >= 2
    error = np.where(is_faulty, size, 1e-7) * -np.expm1(engine) * random.standard_normal(len(engine))
    findings = diagnose(rollouts_of(engine + error, engine), rounding="bfloat16").findings
    assert [finding.cause for finding in findings][:1] == [cause], findings
    assert cause == "routing" or f"{is_faulty.sum()} of 600 tokens" in findings[0].evidence


def test_more_tokens_than_are_examined_are_sampled_with_a_note(monkeypatch: Any) -> None:
    monkeypatch.setattr("kleash.diagnosis.doctor.MOST_TOKENS", 300)
    diagnosis = diagnose(rollouts_of(*drawn_columns(np.random.default_rng(7), 0.7)))
    assert (diagnosis.tokens, diagnosis.sequences) == (600, 20)
    assert diagnosis.findings[0].cause == "temperature"
    assert "300 of 600 tokens were examined, a random sample in 20 of 20 responses" in diagnosis.notes


@pytest.mark.parametrize(("responses", "length", "most_tokens"), [(1000, 10, 5000), (5, 1000, 500)])
def test_a_sample_has_many_responses_or_parts_of_them(responses: int, length: int, most_tokens: int) -> None:
    column = -np.arange(1.0, responses * length + 1)
    rollouts = rollouts_of(column, column, length)
    rollouts[0].is_counted[0] = False
    sample = sample_rollouts(rollouts, most_tokens)
    assert most_tokens * 0.95 < sum(rollout.is_counted.sum() for rollout in sample) <= most_tokens
    numbers = [rollout.prompt_ids[0] for rollout in sample]
    assert numbers == sorted(set(numbers)) and len(numbers) == min(responses, 500)
    for rollout in sample:
        assert not (rollout.is_counted & ~rollouts[rollout.prompt_ids[0]].is_counted).any()
    if length == 1000:
        places = [np.flatnonzero(rollout.is_counted) for rollout in sample[1:]]
        assert all((place[:50] == np.arange(50)).all() and np.ptp(place[50:]) == 49 for place in places)
        assert len({int(place[50]) for place in places}) > 1
    assert sample_rollouts(rollouts, responses * length) is rollouts
