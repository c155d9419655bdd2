import pytest
import torch
from distributions import log
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr

from kleash.divergences import at_temperature, kl, restrict, truncate
from kleash.errors import OptionError
from kleash.estimators import Semantics, require_same_semantics, to_full, to_truncated

torch.manual_seed(5)
P, MU, Q = torch.randn(3, 8, dtype=torch.float64).log_softmax(-1)
CUT = truncate(MU, top_p=0.8)
CUT_P = restrict(P, CUT.kept)
DRAWN = CUT.logp.exp()
FUNCTION = Q.square()
"""An arbitrary function to average over the truncated policy."""
TRUTH = (CUT_P.logp.exp() * FUNCTION).sum()


def weighted_mean(weights):
    """Over tokens drawn from the truncated behaviour distribution, as a finite sum."""
    return (DRAWN * torch.where(CUT.kept, weights, 0.0) * FUNCTION).sum().item()


def test_weights_of_mixed_semantics_are_biased_by_the_kept_mass():
    assert 2 < CUT.kept.sum() < 8
    kept_of_p, kept_of_mu = CUT_P.log_kept_mass.exp(), CUT.log_kept_mass.exp()
    truth = TRUTH.item()
    mixed = (P - CUT.logp).exp()
    assert weighted_mean(mixed) == pytest.approx(truth * kept_of_p.item())
    both_full = (P - MU).exp()
    assert weighted_mean(both_full) == pytest.approx(truth * (kept_of_p / kept_of_mu).item())
    torch.testing.assert_close(mixed[CUT.kept], (both_full * kept_of_mu)[CUT.kept])
    truncated = to_truncated(P, CUT_P.log_kept_mass.expand(8), CUT.kept)
    assert weighted_mean((truncated - CUT.logp).exp()) == pytest.approx(truth)
    assert abs(1 - kept_of_p) > 0.05 and abs(1 - kept_of_p / kept_of_mu) > 0.01


def test_to_full_inverts_to_truncated():
    mass = CUT.log_kept_mass.expand(8)
    torch.testing.assert_close(to_full(CUT.logp, mass)[CUT.kept], MU[CUT.kept])
    torch.testing.assert_close(to_truncated(MU, mass, CUT.kept), CUT.logp)
    assert (to_truncated(MU, mass, CUT.kept)[~CUT.kept] == -torch.inf).all()
    torch.testing.assert_close(to_truncated(MU, mass), MU - CUT.log_kept_mass)
    assert not torch.allclose(to_truncated(MU, mass), to_full(MU, mass))


def test_a_removed_token_has_no_gradient():
    token_logp = MU.clone().requires_grad_()
    kept = to_truncated(token_logp, CUT.log_kept_mass.expand(8), CUT.kept)[CUT.kept]
    (gradient,) = torch.autograd.grad(kept.sum(), token_logp)
    assert torch.equal(gradient, CUT.kept.double())


@given(st.integers(0, 1000), st.integers(1, 6))
def test_the_kl_decomposes_over_kept_and_removed_tokens(seed, k):
    """KL(truncated p || q) is the KL among the kept tokens minus q's log kept mass; KL(p || q) has two more terms."""
    draw = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, 7, generator=draw, dtype=torch.float64).log_softmax(-1)
    cut = truncate(p, top_k=k)
    cut_q, rest_p, rest_q = restrict(q, cut.kept), restrict(p, ~cut.kept), restrict(q, ~cut.kept)
    exact = rel_entr(p.exp().numpy(), q.exp().numpy()).sum()
    among = kl(cut.logp, cut_q.logp)
    torch.testing.assert_close(kl(cut.logp, q), among - cut_q.log_kept_mass)
    share = cut.log_kept_mass.exp()
    sides = [torch.stack([x.log_kept_mass, y.log_kept_mass]) for x, y in ((cut, rest_p), (cut_q, rest_q))]
    parts = kl(*sides) + share * among + (1 - share) * kl(rest_p.logp, rest_q.logp)
    assert parts.item() == pytest.approx(exact, rel=1e-9, abs=1e-12)


def test_restrict_renormalises_over_the_given_tokens():
    logp = log(0.5, 0.3, 0.2)
    got = restrict(logp, torch.tensor([True, False, True]))
    torch.testing.assert_close(got.logp.exp(), torch.tensor([5 / 7, 0, 2 / 7]).double())
    assert got.log_kept_mass.exp().item() == pytest.approx(0.7)
    assert restrict(logp.bfloat16(), got.kept).logp.dtype == torch.float32
    nothing = restrict(log(0.5, 0.5, 0.0), torch.tensor([False, False, True]))
    assert nothing.log_kept_mass == -torch.inf and nothing.logp[2].isnan()


def test_semantics_of_logits_agree_with_truncate():
    logits = torch.randn(3, 8, dtype=torch.float64)
    got = Semantics(temperature=0.7, top_k=5, top_p=0.9, min_p=0.3).of(logits)
    expected = truncate(at_temperature(logits, 0.7), top_k=5, top_p=0.9, min_p=0.3)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    torch.testing.assert_close(Semantics().of(logits).logp, logits.log_softmax(-1))


@pytest.mark.parametrize(
    ("semantics", "words"),
    [
        (Semantics(), "the full softmax at temperature 1"),
        (Semantics(temperature=0.7, top_p=1.0, min_p=0.0), "the full softmax at temperature 0.7"),
        (Semantics(top_k=20, min_p=0.1), "cut to top_k 20, min_p 0.1 at temperature 1"),
    ],
)
def test_semantics_as_text(semantics, words):
    assert str(semantics) == words
    assert semantics.truncated is words.startswith("cut")


FULL, WARM, CUTS = Semantics(), Semantics(temperature=0.7), Semantics(top_p=0.95)


def test_equal_semantics_pass():
    require_same_semantics(policy=FULL, behaviour=Semantics(top_p=1.0), reference=FULL, sampler=FULL)
    require_same_semantics(policy=CUTS, behaviour=CUTS)
    require_same_semantics(policy=CUTS)
    require_same_semantics()


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ({"policy": FULL, "behaviour": WARM}, "policy is the full softmax at temperature 1 and behaviour"),
        ({"policy": FULL, "behaviour": CUTS}, r"cut to top_p 0.95 at temperature 1, so their ratio carries"),
        ({"policy": CUTS, "behaviour": Semantics(top_k=50)}, "behaviour cut to top_k 50 at temperature 1"),
        ({"policy": FULL, "behaviour": FULL, "sampler": CUTS}, "policy is .* and sampler cut to top_p 0.95"),
        ({"policy": FULL, "behaviour": FULL, "reference": WARM}, "and reference the full softmax at temp"),
    ],
)
def test_unequal_semantics_raise(sides, message):
    with pytest.raises(OptionError, match=message):
        require_same_semantics(**sides)
