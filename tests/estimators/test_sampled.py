"""Every field of ``ESTIMATORS`` by exact enumeration: expectations are finite sums."""

import pytest
import torch
from compiling import compiles
from distributions import gradients

from kleash.divergences import kl, total_variation
from kleash.estimators import ESTIMATORS, sampled_kl

NAMES = list(ESTIMATORS)
torch.manual_seed(0)
LOGITS_P, LOGITS_Q = torch.randn(2, 8, dtype=torch.float64)
LOGP, LOGQ = (x.log_softmax(-1) for x in (LOGITS_P, LOGITS_Q))

TARGETS = {
    "zero": lambda logp: 0 * logp,
    "KL(p ‖ q)": lambda logp: kl(logp, LOGQ),
    "KL(q ‖ p)": lambda logp: kl(LOGQ, logp),
    "sum |p - q|": lambda logp: 2 * total_variation(logp, LOGQ),
}


def gradient_in_p(function):
    """The gradient in the logits of p."""
    return gradients(function, LOGITS_P)[0]


def is_close(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_the_table_is_read_only():
    with pytest.raises(TypeError):
        ESTIMATORS["k4"] = ESTIMATORS["k1"]


@pytest.mark.parametrize("name", NAMES)
def test_unbiased_agrees_with_enumeration(name):
    mean = (LOGP.exp() * sampled_kl(LOGP, LOGQ, name)).sum()
    assert is_close(mean, kl(LOGP, LOGQ)) is ESTIMATORS[name].unbiased


@pytest.mark.parametrize("name", NAMES)
def test_never_negative_agrees_with_a_grid_of_log_ratios(name):
    u = torch.cat([torch.linspace(-30, 30, 2001, dtype=torch.float64), torch.tensor([1e-9, -1e-9])])
    assert bool((ESTIMATORS[name].of(u) >= 0).all()) is ESTIMATORS[name].never_negative


@pytest.mark.parametrize("name", NAMES)
def test_backpropagated_agrees_with_the_enumerated_gradient(name):
    """As a loss, on samples of the current p: E_p[grad estimator], p itself a constant."""
    estimated = gradient_in_p(lambda logp: logp.exp().detach() * sampled_kl(logp, LOGQ, name))
    matching = {word for word, target in TARGETS.items() if is_close(estimated, gradient_in_p(target))}
    assert matching == {ESTIMATORS[name].backpropagated}


@pytest.mark.parametrize("name", NAMES)
def test_right_as_reward_agrees_with_the_enumerated_gradient(name):
    """Detached, times the score: E_p[sg(estimator) grad log p]."""
    estimated = gradient_in_p(lambda logp: logp.exp().detach() * sampled_kl(logp, LOGQ, name).detach() * logp)
    assert is_close(estimated, gradient_in_p(TARGETS["KL(p ‖ q)"])) is ESTIMATORS[name].right_as_reward


def test_every_estimator_is_infinite_where_q_is_zero_and_has_no_gradient_where_it_is_selected_away():
    token_logp = torch.tensor([-1.0, torch.nan, -2.0], requires_grad=True)
    for name in NAMES:
        values = sampled_kl(token_logp, torch.tensor([-torch.inf, -1.0, -1.0]), name)
        assert values[0] == torch.inf
        (gradient,) = torch.autograd.grad(values.where(token_logp == -2, 0.0).sum(), token_logp)
        assert gradient[:2].tolist() == [0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_equal_arguments_give_zero_and_empty_inputs_stay_empty(name):
    token_logp = torch.tensor([[-3.7, -0.1]])
    assert sampled_kl(token_logp, token_logp, name).tolist() == [[0, 0]]
    assert sampled_kl(token_logp[:0], token_logp[:0], name).shape == (0, 2)


@compiles
@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_without_graph_breaks(name, compiler):
    compiled = torch.compile(lambda a, b: sampled_kl(a, b, name), fullgraph=True, backend="aot_eager")
    a, b = torch.linspace(-3, 0, 20, requires_grad=True), torch.linspace(-1, -2, 20)
    found, expected = ((x, torch.autograd.grad(x.sum(), a)) for x in (compiled(a, b), sampled_kl(a, b, name)))
    torch.testing.assert_close(found, expected)
