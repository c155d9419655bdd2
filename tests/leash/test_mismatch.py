"""Trainer against engine, on a batch in which every sequence is as frequent as it is probable."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from markov_models import MarkovModel
from scipy.special import rel_entr
from scipy.stats import pearsonr

from kleash.auditing.toy_distributions import every_sequence
from kleash.errors import OptionError
from kleash.leash import Mismatch, mismatch

NAN, INF = float("nan"), float("inf")
STEPS, ROWS = 3, 64
ENGINE = MarkovModel(
    first=torch.tensor([2.0, 1, 1]).double().div(4).log(),
    then=torch.tensor([[1.0, 1, 2], [2, 1, 1], [1, 2, 1]]).double().div(4).log(),
)
TRAINER = ENGINE.moved(0, apart=0.4)
EACH = every_sequence(3, STEPS)
TIMES = (ROWS * ENGINE.token_logp(EACH).sum(-1).exp()).round().long()
DRAWN = EACH.repeat_interleave(TIMES, dim=0)
ALL = torch.ones(DRAWN.shape, dtype=torch.bool)


def sides():
    return TRAINER.token_logp(DRAWN), ENGINE.token_logp(DRAWN)


@pytest.fixture(scope="module")
def found():
    return mismatch(*sides(), ALL)


def along_the_prefixes(of_pair):
    """Mean over steps of a divergence of (engine, trainer), at prefixes as the engine draws them."""
    engine, trainer = (model.next_logp(DRAWN).exp().numpy() for model in (ENGINE, TRAINER))
    return of_pair(engine, trainer).sum(-1).mean()


def jensen_shannon(e, t):
    return (rel_entr(e, (e + t) / 2) + rel_entr(t, (e + t) / 2)) / 2


def test_token_means_are_the_named_divergences(found):
    expected = {
        "kl_engine_trainer": along_the_prefixes(rel_entr),
        "kl_engine_trainer_k1": along_the_prefixes(rel_entr),
        "kl_trainer_engine": along_the_prefixes(lambda e, t: rel_entr(t, e)),
        "jensen_shannon": along_the_prefixes(jensen_shannon),
        "chi_squared": along_the_prefixes(lambda e, t: (t - e) ** 2 / e),
        "mean_weight": 1.0,
        "sequence_mean_weight": 1.0,
    }
    for name, value in expected.items():
        assert getattr(found, name).value == pytest.approx(value, rel=1e-12), name
    apart = expected["kl_engine_trainer"] / expected["kl_trainer_engine"]
    assert abs(apart - 1) > 0.02, "so alike that a wrong direction would not be seen"


def test_sequence_means_are_the_named_divergences(found):
    engine, trainer = (model.token_logp(EACH).sum(-1).exp().numpy() for model in (ENGINE, TRAINER))
    assert found.sequence_kl_engine_trainer.value == pytest.approx(rel_entr(engine, trainer).sum())
    chi_squared = ((trainer - engine) ** 2 / engine).sum()
    assert found.sequence_chi_squared.value == pytest.approx(chi_squared)
    assert found.effective_sequences == pytest.approx(ROWS / (1 + chi_squared))
    assert found.effective_sample_size == pytest.approx(ROWS * STEPS / (1 + found.chi_squared.value))
    assert (found.tokens, found.sequences, found.ruled_out) == (ROWS * STEPS, ROWS, 0)


def test_perplexities_and_probability_gaps(found):
    trainer, engine = (x.numpy() for x in sides())
    assert found.perplexity_trainer.value == pytest.approx(np.exp(-trainer.mean()))
    assert found.perplexity_engine.value == pytest.approx(np.exp(-engine.mean()))
    assert found.perplexity_ratio.value == pytest.approx(np.exp((engine - trainer).mean()))
    means, gap = found.over_sequences, (engine - trainer).mean(-1)
    assert means.perplexity_trainer == pytest.approx(np.exp(-trainer.mean(-1)).mean())
    assert means.perplexity_engine == pytest.approx(np.exp(-engine.mean(-1)).mean())
    assert means.perplexity_ratio == pytest.approx(np.exp(gap).mean())
    assert means.log_perplexity_gap == pytest.approx(gap.mean())
    assert (means.largest_gap, means.least_gap) == pytest.approx((gap.max(), gap.min()))
    assert means.absolute_gap == pytest.approx(abs(gap).mean())
    apart = abs(np.exp(trainer) - np.exp(engine))
    pearson = pearsonr(np.exp(trainer).ravel(), np.exp(engine).ravel())[0]
    assert found.probabilities == pytest.approx((pearson, apart.max(), apart.mean(), apart.std(ddof=1)))
    swapped = mismatch(*sides()[::-1], ALL)
    assert found.largest_log_ratio == swapped.largest_log_ratio == pytest.approx(abs(trainer - engine).max())


def test_errors_are_clustered_by_sequences_or_prompts(found):
    """sqrt(C / (C - 1) sum of squared residuals) / total, by hand."""
    u = (sides()[1] - sides()[0]).numpy()

    def error(groups):
        sums, counts = u.reshape(groups, -1).sum(-1), np.full(groups, u.size / groups)
        residual = sums - u.mean() * counts
        return math.sqrt(groups / (groups - 1) * (residual**2).sum()) / u.size

    assert found.kl_engine_trainer_k1.standard_error == pytest.approx(error(ROWS))
    assert found.kl_engine_trainer_k1.clusters == ROWS
    grouped = mismatch(*sides(), ALL, prompts=torch.arange(ROWS) // 2 * 7)
    assert grouped.kl_engine_trainer_k1.standard_error == pytest.approx(error(ROWS // 2))
    assert grouped.sequence_chi_squared.clusters == ROWS // 2
    assert found.kl_engine_trainer.ci95[0] > 0 and found.perplexity_ratio.ci95[1] > 1


def test_a_variance_of_weights_that_lacks_the_large_ones_has_a_warning(found):
    """Of u normal(-2, 4), exp(u) has the mean 1 and the variance exp(4) - 1."""
    columns = 2 * torch.randn(50, 64, 1, generator=torch.Generator().manual_seed(4)).double() - 2
    numbers = [mismatch(u - 20, torch.full_like(u, -20), ALL[:, :1]).sequence_chi_squared for u in columns]
    assert np.mean([number.ci95[1] < math.expm1(4) for number in numbers]) > 0.5
    assert all("effective sample size" in "".join(number.warnings) for number in numbers)
    assert not found.sequence_chi_squared.warnings and not found.mean_weight.warnings


def test_equal_log_probabilities_have_no_mismatch():
    engine = ENGINE.token_logp(DRAWN).float()
    same = mismatch(engine, engine, ALL)
    assert same.perplexity_ratio.value == 1 and same.effective_sample_size == pytest.approx(ROWS * STEPS)
    assert same.probabilities.pearson == pytest.approx(1)
    means = ("kl_engine_trainer", "kl_engine_trainer_k1", "kl_trainer_engine", "jensen_shannon")
    for name in (*means, "chi_squared", "sequence_kl_engine_trainer", "sequence_chi_squared"):
        number = getattr(same, name)
        assert (number.value, number.standard_error, number.ci95, number.warnings) == (0, 0, (0, 0), ())
    assert same.mean_weight.ci95 == same.sequence_mean_weight.ci95 == same.perplexity_ratio.ci95 == (1.0, 1.0)
    low, high = same.perplexity_trainer.ci95
    assert low < high


def test_equal_placeholders_and_one_bit_of_difference_have_an_error():
    engine = ENGINE.token_logp(DRAWN)
    nearly = engine.clone()
    nearly[0, 0] = torch.nextafter(nearly[0, 0], nearly[0, 0] - 1)
    for trainer, other in ((engine * 0, engine * 0), (nearly, engine)):
        assert mismatch(trainer, other, ALL).kl_engine_trainer.ci95[1] > 0


def test_masked_values_are_not_read_and_empty_sequences_are_ignored():
    trainer, engine = sides()
    mask = torch.ones(ROWS, STEPS, dtype=torch.long)
    mask[:, 2], mask[5] = 0, 0
    rows = [i for i in range(ROWS) if i != 5]
    short = mismatch(trainer[rows, :2], engine[rows, :2], ALL[rows, :2])
    hidden = mismatch(trainer.where(mask == 1, NAN), engine.where(mask == 1, INF), mask)
    assert hidden.effective_sample_size == pytest.approx(short.effective_sample_size)
    assert replace(hidden, effective_sample_size=short.effective_sample_size) == short
    assert isinstance(short, Mismatch) and hidden.sequences == ROWS - 1
    prompts = torch.arange(ROWS) // 3
    labelled = mismatch(trainer, engine, mask, prompts=prompts)
    expected = mismatch(trainer[rows, :2], engine[rows, :2], ALL[rows, :2], prompts=prompts[rows])
    assert labelled.kl_engine_trainer == expected.kl_engine_trainer != hidden.kl_engine_trainer


def test_tokens_of_probability_zero_and_nan():
    trainer, engine = sides()
    trainer[3, 1] = -INF
    found = mismatch(trainer, engine, ALL)
    assert found.kl_engine_trainer.value == INF and found.ruled_out == 1
    assert math.isfinite(found.kl_trainer_engine.value) and math.isfinite(found.jensen_shannon.value)
    assert found.chi_squared.value < 1 and found.effective_sequences < ROWS
    assert found.perplexity_trainer.value == INF and found.kl_engine_trainer.warnings
    trainer[3, 1] = NAN
    unknown = mismatch(trainer, engine, ALL)
    for name in ("kl_engine_trainer", "kl_trainer_engine", "jensen_shannon", "chi_squared"):
        assert math.isnan(getattr(unknown, name).value) and getattr(unknown, name).warnings
    assert math.isnan(unknown.probabilities.pearson) and math.isnan(unknown.largest_log_ratio)


def test_without_tokens_all_statistics_are_nan():
    nothing = torch.zeros(2, 3)
    for given in ((nothing, nothing, nothing.bool()), (nothing[:0],) * 2 + (ALL[:0],)):
        found = mismatch(*given)
        assert math.isnan(found.kl_engine_trainer.value) and math.isnan(found.effective_sample_size)
        assert math.isnan(found.over_sequences.largest_gap) and found.sequences == 0
    alone = mismatch(nothing[:1, :1] - 1, nothing[:1, :1] - 2, ALL[:1, :1])
    assert alone.kl_engine_trainer.value > 0 and alone.jensen_shannon.ci95 == (0, math.log(2))
    assert math.isnan(alone.probabilities.pearson)


def test_half_precision_and_gradients_are_accepted():
    trainer, engine = (x.bfloat16().requires_grad_() for x in sides())
    exact = mismatch(trainer.detach().double(), engine.detach().double(), ALL)
    with torch.device("meta"):
        assert mismatch(trainer, engine, ALL) == exact


def test_invalid_mismatch_arguments_are_errors(found, unhooked):
    with pytest.raises(OptionError, match="system is 'trl'; there are verl"):
        found.renamed("trl")
