import pytest

from kleash.measuring.estimand import UNVERIFIED_SAMPLES, estimand_of
from kleash.records import MeasureJob


def test_on_policy_samples_allow_estimators_and_sequence_kl():
    estimand = estimand_of(MeasureJob())
    assert estimand.weighting == "unweighted" and estimand.has_sequence_kl and not estimand.warnings
    assert "KL(policy ‖ reference) in nats per token" in estimand.description
    assert (
        "the policy's own responses to shipped:prompts, of up to 256 tokens, drawn from its whole"
        in estimand.description
    )
    assert "both at temperature 1," in estimand.description


@pytest.mark.parametrize(
    ("options", "words"), [({"top_p": 0.9}, "top-p 0.9"), ({"top_k": 5, "min_p": 0.1}, "top-k 5, min-p 0.1")]
)
def test_truncated_sampling_leaves_out_estimators_and_sequence_kl(options, words):
    estimand = estimand_of(MeasureJob(**options))
    assert estimand.weighting is None and not estimand.has_sequence_kl
    assert f"drawn from its distribution truncated to {words}" in estimand.description
    assert "never contains the removed tokens" in estimand.estimators_note


def test_greedy_responses_leave_out_estimators_and_are_scored_at_temperature_1():
    estimand = estimand_of(MeasureJob(temperature=0.0))
    assert estimand.weighting is None and not estimand.has_sequence_kl
    assert "decoded greedily" in estimand.description and "both at temperature 1," in estimand.description
    assert "no average over them estimates a divergence" in estimand.estimators_note


def test_text_leaves_out_estimators_and_sequence_kl():
    estimand = estimand_of(MeasureJob(text="corpus.txt", window=128, stride=64))
    assert estimand.weighting is None and not estimand.has_sequence_kl
    assert (
        "the prefixes of the text corpus.txt, read in windows of 128 tokens, 64 tokens apart"
        in estimand.description
    )
    assert "as long as the models can read" in estimand_of(MeasureJob(text="a")).description


@pytest.mark.parametrize("has_logprobs", [True, False])
def test_off_policy_responses_are_weighted_if_they_have_logprobs(has_logprobs):
    estimand = estimand_of(MeasureJob(responses="r.jsonl", temperature=0.6), all_have_logprobs=has_logprobs)
    assert estimand.weighting == ("importance" if has_logprobs else "unweighted")
    assert estimand.has_sequence_kl is has_logprobs
    assert estimand.warnings == (() if has_logprobs else (UNVERIFIED_SAMPLES,))
    assert "both at temperature 0.6" in estimand.description
