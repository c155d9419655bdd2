"""The rules for KL terms against gradients that are enumerated here, without reading the rules."""

from itertools import product

import pytest
import torch
from every_response import World, error, expected, gradient

from kleash.divergences import kl
from kleash.estimators import ESTIMATORS
from kleash.estimators.weights import LEVELS
from kleash.kl_rules import CONTRACTS, RULES, VALUES, refusal, term_spec

KL, REVERSE_KL, TWICE_TV = "KL(p ‖ q)", "KL(q ‖ p)", "sum |p - q|"
ESTIMATOR_NAMES = ["k1", "abs", "k2", "k3", "exact"]
VALUES_OF = {
    "k1": lambda u: u,
    "abs": lambda u: u.abs(),
    "k2": lambda u: u.square() / 2,
    "k3": lambda u: torch.expm1(-u) + u,
}


def later(x):
    """For each token the sum over the tokens after it."""
    return x.flip(-1).cumsum(-1).flip(-1) - x


class TermGradient:
    """The expected gradient of a term, as the sum over all responses of a tiny world."""

    def __init__(self, estimator, ratio):
        self.estimator, self.ratio = estimator, ratio
        self.world = World(seed=1, end=2, on_policy=ratio == "none")

    def token_values(self, table):
        """(log p, the estimator with its gradient, the log ratio), 0 where masked."""
        world = self.world
        logp = world.token_logp(table)
        u = torch.where(world.mask, logp - world.token_logp(world.tables[1]), 0.0)
        if self.estimator == "exact":
            value = torch.where(world.mask, kl(world.next_logp(table), world.next_logp(world.tables[1])), 0.0)
        else:
            value = VALUES_OF[self.estimator](u)
        return torch.where(world.mask, logp, 0.0), value, u

    def weights(self, logp):
        """Importance weights of the level, with their gradient."""
        behaviour = torch.where(self.world.mask, self.world.token_logp(self.world.tables[2]), 0.0)
        log_ratio = logp - behaviour
        products = {
            "none": torch.zeros_like(log_ratio),
            "token": log_ratio,
            "before": log_ratio.cumsum(-1) - log_ratio,
            "prefix": log_ratio.cumsum(-1),
            "sequence": log_ratio.sum(-1, keepdim=True).expand_as(log_ratio),
        }
        return torch.where(self.world.mask, products[self.ratio].exp(), 0.0)

    def of_loss(self, rule, scope):
        def per_token(table):
            logp, value, u = self.token_values(table)
            attached = self.weights(logp)
            weights = attached.detach()
            if rule == "score":
                own = weights * (value if self.estimator == "exact" else u).detach() * logp
            else:
                own = value * (attached if rule == "ratio_attached" else weights)
            if scope == "token" or rule == "ratio_attached":
                return own
            return own + later((weights * value).detach()) * logp

        return gradient(lambda x: expected(self.world, per_token, x), self.world.tables[0])

    def of_reward(self, credit):
        def per_token(table):
            logp, value, _ = self.token_values(table)
            penalty = value.detach()
            if credit == "own_token":
                return penalty * logp
            if credit == "response":
                return penalty.sum(-1, keepdim=True) * logp
            own = value if self.estimator == "exact" else penalty * logp
            return own + later(penalty) * logp

        return gradient(lambda x: expected(self.world, per_token, x), self.world.tables[0])

    def truth(self, scope, follows):
        """The gradient of the divergence that the term names, from its definition."""
        world, (p, q, mu) = self.world, self.world.tables
        prefixes = p if self.ratio in ("before", "prefix", "sequence") else mu

        def between(logp, logq):
            if follows == KL:
                return kl(logp, logq)
            return kl(logq, logp) if follows == REVERSE_KL else (logp.exp() - logq.exp()).abs().sum(-1)

        def of_tokens(x):
            each = torch.where(world.mask, between(world.next_logp(x), world.next_logp(q)), 0.0)
            return (world.probability(prefixes).detach() * each.sum(-1)).sum()

        def of_responses(x):
            logp, logq = (torch.where(world.mask, world.token_logp(table), 0.0).sum(-1) for table in (x, q))
            first = torch.unique(torch.where(world.mask, world.tokens, -1), dim=0, return_inverse=True)[1]
            index = torch.stack([(first == i).nonzero()[0, 0] for i in range(int(first.max()) + 1)])
            return between(logp[index], logq[index])

        return gradient(of_tokens if scope == "token" else of_responses, p)


def is_right(enumerated, truth):
    off = error(enumerated, truth)
    assert off < 1e-10 or off > 1e-3, "neither right nor clearly wrong"
    return off < 1e-10


def reason_for(estimator, **fields):
    return refusal(term_spec(estimator, CONTRACTS.get(estimator), **fields))


@pytest.mark.parametrize("ratio", ["none", *LEVELS])
@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
def test_a_loss_is_accepted_if_and_only_if_its_gradient_is_the_named_one(estimator, ratio):
    """A ratio attached without a ratio means nothing and is not enumerated."""
    terms = TermGradient(estimator, ratio)
    rules = ["score", "backpropagated", *(["ratio_attached"] if ratio != "none" else [])]
    for rule, scope in product(rules, ["token", "sequence"]):
        enumerated = terms.of_loss(rule, scope)
        for follows in (KL, REVERSE_KL, TWICE_TV):
            reason = reason_for(estimator, gradient=rule, ratio=ratio, scope=scope, follows=follows)
            right = is_right(enumerated, terms.truth(scope, follows))
            assert (reason is None) == right, (rule, scope, follows, reason)


@pytest.mark.parametrize("credit", ["own_token", "later_tokens", "response"])
@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
def test_a_reward_is_accepted_if_and_only_if_its_gradient_is_the_named_one(estimator, credit):
    terms = TermGradient(estimator, "none")
    enumerated = terms.of_reward(credit)
    for scope, follows in product(["token", "sequence"], [KL, REVERSE_KL, TWICE_TV]):
        reason = reason_for(estimator, place="reward", scope=scope, follows=follows, credit=credit)
        right = is_right(enumerated, terms.truth(scope, follows))
        assert (reason is None) == right, (scope, follows, reason)


def test_defaults_are_accepted_wherever_a_right_gradient_exists():
    assert [name for name in ESTIMATOR_NAMES if reason_for(name) is None] == ESTIMATOR_NAMES
    assert [name for name in ESTIMATOR_NAMES if reason_for(name, place="reward") is None] == ["k1"]
    in_loss, in_reward = term_spec("k1", CONTRACTS["k1"]), term_spec("k1", CONTRACTS["k1"], place="reward")
    assert (in_loss.scope, in_loss.gradient) == ("token", "score")
    assert (in_reward.scope, in_reward.gradient, in_reward.credit) == ("sequence", "none", "response")


def test_every_rule_refuses_a_term_that_no_earlier_rule_refuses():
    reached = set()
    for estimator, place, scope, rule, ratio, credit, follows, cap, sums in product(
        ESTIMATOR_NAMES, *(VALUES[x] for x in ("place", "scope", "gradient", "ratio", "credit")),
        (KL, REVERSE_KL), (None, 0.0, 2.0), (True, False),
    ):  # fmt: skip
        term = term_spec(
            estimator, CONTRACTS.get(estimator), place=place, scope=scope, gradient=rule, ratio=ratio,
            credit=credit, follows=follows, cap=cap, sums_sequences=sums,
        )  # fmt: skip
        rules = [(i, each) for i, each in enumerate(RULES) if each.place in (None, term.place)]
        reached |= {next((i for i, each in rules if each.applies(term)), None)}
    assert reached == {None, *range(len(RULES))}


def test_the_table_agrees_with_the_estimators():
    for name, contract in CONTRACTS.items():
        estimator = ESTIMATORS[name]
        assert all(getattr(estimator, field) == value for field, value in vars(contract).items())
    assert set(CONTRACTS) == set(ESTIMATORS) and VALUES["ratio"] == ("none", *LEVELS)
