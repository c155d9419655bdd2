"""Terms named in full: what is refused, with its reason, and that what is accepted is right."""

from itertools import product

import pytest
import torch
from every_response import World, error, expected, gradient

from kleash.divergences import kl
from kleash.errors import DetachedError, KleashError, OptionError, UnknownNameError
from kleash.estimators import bounded_k3, importance_weights, sampled_kl
from kleash.losses import KLTerm, future_kl_loss, kl_loss


def every_term():
    """All combinations of the words that are not refused."""
    words = {
        "estimator": ["k1", "abs", "k2", "k3", "exact"],
        "gradient": ["score", "backpropagated", "ratio_attached"],
        "ratio": ["none", "token", "before", "prefix", "sequence"],
        "scope": ["token", "sequence"],
        "follows": ["KL(p ‖ q)", "KL(q ‖ p)", "sum |p - q|"],
    }
    for chosen in product(*words.values()):
        try:
            yield KLTerm(aggregation="sequence_sum", **dict(zip(words, chosen, strict=True)))
        except KleashError:
            continue


TERMS = list(every_term())


def per_token_of(term, world):
    logq_all, behaviour = world.next_logp(world.tables[1]), world.token_logp(world.tables[2])

    def per_token(table):
        token_kl = kl(world.next_logp(table), logq_all) if term.estimator == "exact" else None
        return term.per_token(
            world.token_logp(table),
            world.token_logp(world.tables[1]),
            world.mask,
            behaviour_logp=behaviour if term.ratio != "none" else None,
            token_kl=token_kl,
        )

    return per_token


def truth_of(term, world):
    """What a term's gradient has to be that of, by its own words: a function of p's logits."""
    p, q, mu = world.tables
    if term.scope == "sequence":
        return world.sequence_kl
    prefixes = p if term.ratio in ("before", "prefix", "sequence") else mu
    if term.follows == "KL(p ‖ q)":
        return lambda x: world.token_kl(x, prefixes)

    def other(x):
        logp, logq = world.next_logp(x), world.next_logp(q)
        there = kl(logq, logp) if term.follows == "KL(q ‖ p)" else (logp.exp() - logq.exp()).abs().sum(-1)
        return (world.probability(prefixes) * torch.where(world.mask, there, 0.0).sum(-1)).sum()

    return other


@pytest.mark.parametrize(
    "traits", [{"seed": 0}, {"seed": 1, "end": 2, "tool": 1}, {"seed": 3, "end": 0, "tool": 1, "spread": 2.0}]
)
@pytest.mark.parametrize(
    "term", TERMS, ids=[f"{t.estimator} {t.rule} {t.ratio} {t.scope} {t.follows}" for t in TERMS]
)
def test_accepted_terms_have_the_named_gradient(term, traits):
    """And the value, where the estimator is unbiased."""
    world = World(**traits, on_policy=term.ratio == "none")
    per_token, truth = per_token_of(term, world), truth_of(term, world)
    at = world.tables[0].clone().requires_grad_()
    if term.estimator in ("k1", "k3", "exact") and term.follows == "KL(p ‖ q)":
        torch.testing.assert_close(expected(world, per_token, at), truth(at), rtol=1e-12, atol=0)
    assert error(gradient(lambda x: expected(world, per_token, x), at), gradient(truth, at)) < 1e-12


def test_many_terms_are_enumerated():
    """A validation that refused everything would pass the test above."""
    kinds = {(t.rule, t.scope, t.ratio != "none") for t in TERMS}
    assert len(TERMS) > 40 and len(kinds) >= 9
    assert {t.estimator for t in TERMS} == {"k1", "abs", "k2", "k3", "exact"}


P = torch.tensor([[-1.0, -2.5, torch.nan], [-4.0, -0.1, -1.7]])
Q = torch.tensor([[-1.5, -0.5, torch.inf], [-2.0, -0.9, -6.0]])
MU = torch.tensor([[-1.2, -2.0, torch.nan], [-3.0, -0.2, -1.5]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])


def test_a_term_agrees_with_its_functions():
    p = P.clone().requires_grad_()
    weights = importance_weights(P, MU, MASK, level="prefix", cap=1.1).values
    term = KLTerm(ratio="prefix", cap=1.1, scope="sequence", aggregation="sequence_sum")
    assert weights.max() == pytest.approx(1.1), "the cap must bite"
    mean = term.loss(p, Q, MASK, behaviour_logp=MU)
    by_hand = kl_loss(p, Q, MASK, weights=weights)
    by_hand = by_hand + future_kl_loss(p, sampled_kl(P, Q), MASK, weights=weights)
    torch.testing.assert_close(mean.value, by_hand.sum() / 2)
    torch.testing.assert_close(torch.autograd.grad(mean.value, p), torch.autograd.grad(by_hand.sum() / 2, p))
    assert mean.count == 2


def test_the_default_is_the_value_of_k3_with_the_gradient_of_the_kl_per_token():
    p = P.clone().requires_grad_()
    assert KLTerm().rule == "score"
    torch.testing.assert_close(KLTerm().loss(p, Q, MASK).value, kl_loss(p, Q, MASK).sum() / 4)
    assert KLTerm(estimator="exact").rule == "backpropagated"
    assert KLTerm(estimator="k1", place="reward").rule == "none"


def test_a_reward_is_a_detached_penalty():
    term = KLTerm(estimator="k1", place="reward")
    for p in (P, P.clone().requires_grad_()):
        penalty = term.per_token(p, Q, MASK)
        assert not penalty.requires_grad
        torch.testing.assert_close(penalty, torch.where(MASK.bool(), P - Q, 0.0))
    with pytest.raises(OptionError, match="this term is a reward; subtract beta times its per_token"):
        term.loss(P, Q, MASK)


@pytest.mark.parametrize(
    "fields",
    [
        {"ratio": "token"},
        {"gradient": "ratio_attached", "ratio": "token"},
        {"gradient": "ratio_attached", "ratio": "prefix", "scope": "sequence"},
        {"estimator": "k2", "gradient": "backpropagated"},
        {"estimator": "exact", "ratio": "before", "scope": "sequence"},
    ],
)
def test_masked_and_zero_weight_tokens_are_not_read(fields):
    term = KLTerm(**fields)
    p = P.clone()
    p[1, 2] = -torch.inf if term.ratio != "none" else -1.7
    p.requires_grad_()
    token_kl = torch.where(MASK.bool(), p.square(), torch.nan) if fields.get("estimator") == "exact" else None
    if token_kl is not None:
        token_kl = torch.where(p.isinf(), 1.0, token_kl)
    behaviour = MU if term.ratio != "none" else None
    mean = term.loss(p, Q, MASK, behaviour_logp=behaviour, token_kl=token_kl)
    assert mean.value.isfinite()
    (slope,) = torch.autograd.grad(mean.value, p)
    assert slope[:, :2].isfinite().all() and slope[1, 1] == 0 and slope[0, :2].ne(0).any()


def test_the_reference_is_a_constant():
    for fields in ({}, {"estimator": "k2", "gradient": "backpropagated"}):
        p, q = P.clone().requires_grad_(), Q.clone().requires_grad_()
        KLTerm(**fields).loss(p, q, MASK).value.backward()
        assert p.grad is not None and q.grad is None


def test_missing_and_unused_inputs_are_errors():
    p = P.clone().requires_grad_()
    with pytest.raises(OptionError, match="ratio is 'token', so behaviour_logp is needed; give it"):
        KLTerm(ratio="token").loss(p, Q, MASK)
    with pytest.raises(OptionError, match="ratio is 'none', so behaviour_logp would not be used"):
        KLTerm().loss(p, Q, MASK, behaviour_logp=MU)
    with pytest.raises(OptionError, match="estimator is 'exact', so token_kl is needed"):
        KLTerm(estimator="exact").loss(p, Q, MASK)
    with pytest.raises(OptionError, match="estimator is 'k3', so token_kl would not be used"):
        KLTerm().loss(p, Q, MASK, token_kl=p)


@pytest.mark.parametrize("fields", [{}, {"estimator": "k2", "gradient": "backpropagated"}])
def test_detached_log_probabilities_are_an_error(fields):
    with pytest.raises(DetachedError, match="token_logp carries no gradient"):
        KLTerm(**fields).loss(P, Q, MASK)
    with torch.no_grad():
        assert KLTerm(**fields).loss(P, Q, MASK).value.isfinite()
    with pytest.raises(DetachedError, match="token_kl carries no gradient"):
        KLTerm(estimator="exact").loss(P.clone().requires_grad_(), Q, MASK, token_kl=P)


REFUSED = [
    ({"estimator": "k1", "gradient": "backpropagated"}, "k1 backpropagated trains nothing: its gradient"),
    ({"estimator": "k3", "gradient": "backpropagated"}, r"k3 backpropagated follows KL\(q ‖ p\), not KL\(p"),
    ({"estimator": "abs", "gradient": "backpropagated"}, r"abs backpropagated follows sum \|p - q\|"),
    ({"estimator": "k2", "gradient": "ratio_attached", "ratio": "token"}, r"rho \* k2 with the ratio"),
    ({"estimator": "abs", "gradient": "ratio_attached", "ratio": "token"}, r"rho \* abs with the ratio"),
    ({"gradient": "ratio_attached"}, "and no ratio; name the ratio"),
    ({"gradient": "ratio_attached", "ratio": "token", "cap": 2.0}, "a ratio capped at 2.0 has no gradient"),
    ({"gradient": "ratio_attached", "ratio": "prefix"}, "'prefix' that carries a gradient is of scope"),
    ({"gradient": "ratio_attached", "ratio": "token", "scope": "sequence"}, "is of scope 'token', not"),
    ({"gradient": "none"}, "a loss without a gradient trains nothing"),
    ({"estimator": "exact", "gradient": "score"}, "the exact KL has its own gradient"),
    ({"follows": "KL(q ‖ p)"}, r"gradient 'score' follows KL\(p ‖ q\), and KL\(q ‖ p\) was asked for"),
    ({"estimator": "k3", "place": "reward"}, "k3 as a reward does not have the gradient"),
    ({"estimator": "k2", "place": "reward"}, "k2 as a reward does not have"),
    ({"estimator": "abs", "place": "reward"}, "take estimator 'k1', or place 'loss'"),
    ({"estimator": "exact", "place": "reward"}, "lacks the gradient of each token's own KL"),
    ({"estimator": "k1", "place": "reward", "gradient": "score"}, "a reward is detached, so gradient"),
    ({"estimator": "k1", "place": "reward", "ratio": "token"}, "it belongs on the policy loss that the"),
    ({"estimator": "k1", "ratio": "before"}, "ratio 'before' leaves out the token that k1 was sampled from"),
    ({"scope": "sequence", "aggregation": "sequence_mean"}, "'sequence_mean' divides each response by its"),
    ({"scope": "sequence", "ratio": "token"}, "averages over the behaviour's prefixes, which training does"),
    ({"scope": "sequence", "estimator": "k2"}, "makes the value of k2 part of the gradient of earlier"),
    ({"scope": "sequence", "estimator": bounded_k3(-5.0)}, "makes the value of this estimator part of the"),
    ({"estimator": bounded_k3(-5.0), "gradient": "backpropagated"}, "this estimator backpropagated follows"),
    (
        {"estimator": "k3", "gradient": "backpropagated", "follows": "KL(q ‖ p)", "scope": "sequence"},
        r"known for KL\(p ‖ q\) only",
    ),
    ({"cap": 2.0}, "cap is 2.0 and there is no ratio that it could bound"),
    ({"place": "advantage"}, "place is 'advantage'; there are loss, reward"),
    ({"gradient": "straight"}, "gradient is 'straight'; there are score, backpropagated"),
    ({"ratio": "all"}, "ratio is 'all'; there are none, token, before, prefix, sequence"),
    ({"scope": "batch"}, "scope is 'batch'; there are token, sequence"),
    ({"aggregation": "constant"}, "length is None; give the number of tokens"),
    ({"length": 5}, "length is 5, which 'token_mean' does not use"),
    ({"cap": 0, "ratio": "token"}, "cap is 0; give a weight above 0"),
    ({"estimator": "k5"}, "called 'k5'; there are k1, abs, k2, k3"),
    ({"aggregation": "mean"}, "no aggregation is called 'mean'"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refused_terms_give_their_reason(fields, reason, unhooked):
    with pytest.raises((OptionError, UnknownNameError), match=reason) as caught:
        KLTerm(**fields)
    said = str(caught.value)
    assert said[0].islower() or said.startswith("k") or said[0] == "'"
    assert not said.endswith(".") and "\n" not in said
