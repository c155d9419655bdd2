"""Against the real verl, whose import takes some seconds."""

import sys
from functools import cache
from importlib import import_module

import pytest
import torch
from distributions import log
from hypothesis import given, settings
from hypothesis import strategies as st
from kleash_in_verl import kleash_in_verl
from scipy.special import rel_entr

from kleash.auditing.targets.packages import quiet, stand_ins
from kleash.errors import ShapeError, UnknownNameError
from kleash.integrations.verl import NAMES, install, kl_penalty

SPELLINGS = [name + plus for name in NAMES for plus in ("", "+") if NAMES[name] != "exact"]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def core():
    with quiet():  # what verl's own dependencies warn of when they are imported
        return pytest.importorskip("verl.trainer.ppo.core_algos")


def value_and_gradients(function, logprob, ref_logprob, *arguments, **options):
    """Both, with a weight for each token that differs from 1."""
    leaves = [x.detach().clone().requires_grad_() for x in (logprob, ref_logprob)]
    value = function(*leaves, *arguments, **options)
    weights = torch.linspace(0.5, 1.5, value.numel()).to(value.dtype).reshape(value.shape)
    return value.detach(), *torch.autograd.grad((value * weights).sum(), leaves)


NEARBY = st.lists(st.tuples(st.floats(-30, 0), st.floats(-2.6, 10.9)), min_size=1, max_size=12)


@pytest.mark.parametrize("spelling", SPELLINGS)
@settings(max_examples=20)
@given(tokens=NEARBY)
def test_penalty_equals_verl_where_it_does_not_clamp(core, spelling, tokens):
    logprob, ahead = torch.tensor(tokens, dtype=torch.float64).T
    expected = value_and_gradients(core.kl_penalty, logprob, logprob - ahead, spelling)
    got = value_and_gradients(kl_penalty, logprob, logprob - ahead, spelling)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("spelling", ["low_var_kl", "k3"])
@pytest.mark.parametrize("ahead", [-3.0, -8.0, -25.0, 11.5, 30.0])
def test_value_and_gradient_are_exact_beyond_verl_clamp(core, spelling, ahead):
    logprob, ref_logprob = torch.tensor([[-40.0]]), torch.tensor([[-40.0 - ahead]])
    theirs = value_and_gradients(core.kl_penalty, logprob, ref_logprob, spelling)
    assert theirs[0] == 10 and theirs[1] == 0 and theirs[2] == 0
    value, to_policy, to_reference = value_and_gradients(kl_penalty, logprob, ref_logprob, spelling)
    weight = 0.5
    assert value.item() == pytest.approx(torch.tensor(-ahead).exp().item() - 1 + ahead, rel=1e-5)
    assert to_policy.item() == pytest.approx(weight * (1 - torch.tensor(-ahead).exp().item()), rel=1e-5)
    assert to_reference.item() == pytest.approx(-to_policy.item())
    value, to_policy, _ = value_and_gradients(kl_penalty, logprob, ref_logprob, f"{spelling}+")
    assert value.item() > 8 and to_policy.item() == pytest.approx(weight * ahead)


@pytest.mark.parametrize("spelling", ["k1+", "abs+", "k2+", "k3+"])
def test_straight_through_gradient_is_0_for_an_excluded_token(spelling):
    logprob, ref_logprob = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-INF, -2.5]])
    value, to_policy, _ = value_and_gradients(kl_penalty, logprob, ref_logprob, spelling)
    assert value[0, 0] == INF and value[0, 1] > 0
    torch.testing.assert_close(to_policy, torch.tensor([[0.0, 0.75]]))


def test_half_precision_is_subtracted_in_float32():
    logprob, ref_logprob = torch.tensor([-9.0]).bfloat16(), torch.tensor([-9.0625]).bfloat16()
    got = kl_penalty(logprob, ref_logprob, "k3")
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(0.0625 + torch.tensor(-0.0625).expm1().item(), rel=1e-4)


P, Q = log(0.5, 0.3, 0.2, 0.0), log(0.3, 0.3, 0.3, 0.1)


@pytest.mark.parametrize("spelling", ["full", "full+", "exact", "exact+"])
def test_full_is_exact_kl_of_log_probabilities_or_logits(spelling):
    exact = rel_entr(P.exp().numpy(), Q.exp().numpy()).sum()
    logp, logq = (torch.stack([x, x]).reshape(1, 2, 4) for x in (P, Q))
    for shift in (0.0, 3.0):
        got = kl_penalty(logp + shift, logq - shift, spelling)
        assert got.shape == (1, 2)
        assert got[0].tolist() == pytest.approx([exact, exact], rel=1e-12)


def test_full_of_confident_models_is_accurate_in_float32():
    """torch's log_softmax errs by 3e-4 nats."""
    logits = torch.full((1, 1, 152_000), -17.3).index_fill(-1, torch.tensor([7]), 0.0)
    got, right = (kl_penalty(x, 0.9 * x, "full").item() for x in (logits, logits.double()))
    assert got == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("spelling", ["full", "exact+"])
def test_full_is_differentiable(installed, spelling):
    torch.manual_seed(0)
    logits, others = torch.randn(2, 1, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: kl_penalty(a, b, spelling), (logits, others))
    p, u = logits.softmax(-1), logits.log_softmax(-1) - others.log_softmax(-1)
    for penalty in (kl_penalty, installed.kl_penalty):
        (got,) = torch.autograd.grad(penalty(logits, others, spelling).sum(), logits)
        torch.testing.assert_close(got, p * (u - (p * u).sum(-1, keepdim=True)))


def test_invalid_arguments_are_refused(unhooked):
    x = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"given \(2, 3\); .* let its engine do it \(install"):
        kl_penalty(x, x, "full")
    with pytest.raises(ShapeError, match=r"logprob \(2, 3\), ref_logprob \(2, 1\)"):
        kl_penalty(x, x[:, :1], "k1")
    with pytest.raises(UnknownNameError, match="no KL penalty of verl is called 'low_var'"):
        kl_penalty(x, x, "low_var")
    for empty in ("", "+", "k1++"):
        with pytest.raises(UnknownNameError):
            kl_penalty(x, x, empty)


@pytest.fixture
def installed(core):
    with kleash_in_verl() as core_with_kleash:
        yield core_with_kleash


@cache
def verl_modules():
    with quiet(), stand_ins(("uvicorn", "fastapi")):  # which serve verl's rollouts
        return import_module("verl"), import_module("verl.trainer.ppo.ray_trainer")


def charged(logprob, ref_logprob, mask, controller, name):
    """Rewards and mean KL of verl's ``apply_kl_penalty``."""
    protocol, ray_trainer = verl_modules()
    columns = {"old_log_probs": logprob, "ref_log_prob": ref_logprob, "response_mask": mask.long()}
    columns["token_level_scores"] = torch.zeros_like(logprob)
    data = protocol.DataProto.from_dict(tensors={name: values.clone() for name, values in columns.items()})
    data, metrics = ray_trainer.apply_kl_penalty(data, controller, kl_penalty=name)
    kl = torch.tensor(metrics["actor/reward_kl_penalty"], dtype=torch.float64)
    return data.batch["token_level_rewards"], kl


MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
POISON = st.sampled_from([NAN, INF, -INF, 3.0, -1e4])


@st.composite
def masked_batches(draw):
    """Log-probabilities within verl's clamp where the mask is 1, or NaN at one token; anything where it is 0."""
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size = shape[0] * shape[1]
    sizes = {"min_size": size, "max_size": size}
    tokens = draw(st.lists(st.tuples(st.floats(-30, -0.1), st.floats(-2.6, 10.9)), **sizes))
    mask = torch.tensor(draw(st.lists(st.booleans(), **sizes)))
    logprob, ahead = torch.tensor(tokens, dtype=torch.float64).T
    pair = [logprob, logprob - ahead]
    for column in pair:
        column[~mask] = torch.tensor([draw(POISON) for _ in range(int((~mask).sum()))], dtype=torch.float64)
    if draw(st.booleans()) and mask.any():
        pair[draw(st.integers(0, 1))][mask.nonzero()[0]] = NAN
    return *(x.reshape(shape) for x in pair), mask.reshape(shape)


def test_masked_losses_and_rewards_equal_verl_on_zeros(core):
    """verl's own functions, on a batch whose masked tokens are 0: the numbers that any other values must have there."""
    cases, close = [], {"rtol": 1e-9, "atol": 1e-12, "equal_nan": True}

    def loss_and_reward(functions, columns, mask, spelling, mode):
        def loss(*leaves):
            return functions.agg_loss(functions.kl_penalty(*leaves, spelling), mask, mode)

        found = value_and_gradients(loss, *columns)
        return *found, *charged(*columns, mask, core.FixedKLController(0.1), spelling)

    @settings(max_examples=80)
    @given(spelling=st.sampled_from(SPELLINGS), batch=masked_batches(), mode=st.sampled_from(MODES))
    def add_case(spelling, batch, mode):
        *pair, mask = batch
        zeros = [torch.where(mask, x, 0.0) for x in pair]
        expected = loss_and_reward(core, zeros, mask, spelling, mode)
        expected[-1].mul_(len(mask)).div_(mask.any(-1).sum())  # verl counts responses without tokens as 0
        cases.append(((pair, mask, spelling, mode), zeros, expected))

    add_case()
    assert len(cases) >= 80
    with kleash_in_verl() as installed:  # once: it looks through all modules
        for case, zeros, expected in cases:
            is_number = ~expected[1].isnan() & ~(zeros[0] - zeros[1]).isnan()
            for ours, theirs in zip(loss_and_reward(installed, *case), expected, strict=True):
                if ours.shape == is_number.shape:  # k3's clamp gives NaN a gradient of 0 in verl
                    ours, theirs = ours[is_number], theirs[is_number]
                torch.testing.assert_close(ours, theirs, **close, msg=lambda m, case=case: f"{case}: {m}")


def test_missing_verl_is_one_sentence(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ImportError, match=r"^verl is not installed; run: pip install --no-deps verl"):
        install()
