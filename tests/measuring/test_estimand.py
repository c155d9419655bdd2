import pytest
from scipy.stats import norm, t

from kleash.measuring.estimand import UNVERIFIED_SAMPLES, estimand_of, on_policy_warning
from kleash.records import MeasureJob, Number


def test_on_policy_samples_allow_estimators_and_sequence_kl():
    estimand = estimand_of(MeasureJob())
    assert estimand.weighting == "unweighted" and estimand.has_sequence_kl and not estimand.warnings
    assert "KL(policy ‖ reference) in nats per token" in estimand.description
    assert (
        "own responses to shipped:prompts, of up to 256 tokens, drawn from its whole" in estimand.description
    )
    assert "both at temperature 1," in estimand.description
    assert (
        "read in windows of 64 tokens;"
        in estimand_of(MeasureJob(text="t"), window=64, storage="F32").description
    )


@pytest.mark.parametrize(
    ("has_logprobs", "is_greedy", "weighting"),
    [(True, False, "importance"), (False, False, "unweighted"), (True, True, None)],
)
def test_off_policy_responses_are_weighted_if_they_have_logprobs(has_logprobs, is_greedy, weighting):
    job = MeasureJob(responses="r.jsonl", temperature=0.6)
    estimand = estimand_of(job, all_have_logprobs=has_logprobs, is_greedy=is_greedy)
    assert estimand.weighting == weighting and estimand.has_sequence_kl is (weighting == "importance")
    assert estimand.warnings == (() if has_logprobs else (UNVERIFIED_SAMPLES,))
    assert "both at temperature 0.6" in estimand.description


@pytest.mark.parametrize("clusters", [2, 3, 6, 30, 3000])
def test_few_prompts_do_not_make_tokens_look_drawn_from_another_policy(clusters):
    estimand = estimand_of(MeasureJob())
    limit = t.ppf(norm.cdf(4), clusters - 1)
    for value, is_warned in ((-0.99 * limit, False), (1.01 * limit, True)):
        error = Number(value=value, unit="nats", standard_error=1.0, ci95=(0, 0), clusters=clusters)
        assert bool(on_policy_warning(error, estimand)) is is_warned
