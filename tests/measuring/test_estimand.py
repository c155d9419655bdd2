import pytest

from kleash.measuring.estimand import UNVERIFIED_SAMPLES, estimand_of
from kleash.records import MeasureJob


def test_on_policy_samples_allow_estimators_and_sequence_kl() -> None:
    found = estimand_of(MeasureJob())
    assert found.weighting == "none" and found.has_sequence_kl and not found.warnings
    assert "KL(policy || reference) in nats per token" in found.description
    assert (
        "the policy's own responses to shipped:prompts, of up to 256 tokens, drawn from its whole"
        in found.description
    )
    assert "both at temperature 1," in found.description


@pytest.mark.parametrize(
    ("options", "words"),
    [({"top_p": 0.9}, "top-p 0.9"), ({"top_k": 5, "min_p": 0.1}, "top-k 5, min-p 0.1")],
)
def test_truncated_sampling_leaves_out_estimators_and_sequence_kl(
    options: dict[str, float], words: str
) -> None:
    found = estimand_of(MeasureJob(**options))
    assert found.weighting is None and not found.has_sequence_kl
    assert f"drawn from its distribution cut down to {words}" in found.description
    assert "never shows the tokens that were cut off" in found.estimators_note


def test_greedy_responses_leave_out_estimators_and_are_scored_at_temperature_1() -> None:
    found = estimand_of(MeasureJob(temperature=0.0))
    assert found.weighting is None and not found.has_sequence_kl
    assert "decoded greedily" in found.description and "both at temperature 1," in found.description
    assert "no average of theirs estimates a divergence" in found.estimators_note


def test_text_leaves_out_estimators_and_sequence_kl() -> None:
    found = estimand_of(MeasureJob(text="corpus.txt", window=128, stride=64))
    assert found.weighting is None and not found.has_sequence_kl
    assert (
        "the prefixes of the text corpus.txt, read in windows of 128 tokens, 64 tokens apart"
        in found.description
    )
    assert "as long as the models can read" in estimand_of(MeasureJob(text="a")).description


@pytest.mark.parametrize("known", [True, False])
def test_off_policy_responses_are_weighted_if_they_have_logprobs(known: bool) -> None:
    found = estimand_of(MeasureJob(responses="r.jsonl", temperature=0.6), all_have_logprobs=known)
    assert found.weighting == ("importance" if known else "none")
    assert found.has_sequence_kl is known
    assert found.warnings == (() if known else (UNVERIFIED_SAMPLES,))
    assert "both at temperature 0.6" in found.description
