import pytest

from kleash.measuring.estimand import UNVERIFIED_SAMPLES, estimand_of
from kleash.records import MeasureJob


def test_on_policy_samples_allow_estimators_and_sequence_kl():
    estimand = estimand_of(MeasureJob())
    assert estimand.weighting == "unweighted" and estimand.has_sequence_kl and not estimand.warnings
    assert "KL(policy ‖ reference) in nats per token" in estimand.description
    assert (
        "own responses to shipped:prompts, of up to 256 tokens, drawn from its whole" in estimand.description
    )
    assert "both at temperature 1," in estimand.description


@pytest.mark.parametrize("has_logprobs", [True, False])
def test_off_policy_responses_are_weighted_if_they_have_logprobs(has_logprobs):
    estimand = estimand_of(MeasureJob(responses="r.jsonl", temperature=0.6), all_have_logprobs=has_logprobs)
    assert estimand.weighting == ("importance" if has_logprobs else "unweighted")
    assert estimand.has_sequence_kl is has_logprobs
    assert estimand.warnings == (() if has_logprobs else (UNVERIFIED_SAMPLES,))
    assert "both at temperature 0.6" in estimand.description
