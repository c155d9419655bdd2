"""What training does in expectation, exactly, in a world small enough to sum over; and the numbers that docs print."""

import re
from functools import cache

import pytest
import torch
from documentation import ROOT
from toy_algorithms import DEVIATING, REGIONS, RIGHT
from toy_mdp import BETA, GROUP, MASK, POLICY, SCORES, TOKENS, analytic_gradient, apart, said

PAGE = ROOT / "docs" / "explanation" / "algorithms.md"
TRUTH = analytic_gradient()
EVERY = torch.arange(len(TOKENS))


@cache
def update(name):
    return DEVIATING[name]()


def test_the_analytic_gradient_is_that_of_the_objective():
    """Against finite differences of the sum, in which no gradient is taken."""

    def objective(logits):
        every = said(logits, EVERY)
        p, q = (torch.where(MASK, x, 0.0).sum(-1) for x in (every.token_logp, every.reference_logp))
        return (p.exp() * (SCORES - BETA * (p - q))).sum()

    step, flat = 1e-5, torch.eye(POLICY.numel(), dtype=torch.float64).view(-1, *POLICY.shape)
    slopes = [(objective(POLICY + step * d) - objective(POLICY - step * d)) / (2 * step) for d in flat]
    torch.testing.assert_close(torch.stack(slopes), TRUTH, rtol=1e-6, atol=1e-9)
    assert TRUTH.norm() > 0.1


@pytest.mark.parametrize("name", RIGHT)
def test_correct_algorithms_follow_the_gradient_of_the_objective(name):
    error, cosine = apart(RIGHT[name](), TRUTH)
    assert error < 1e-12 and cosine == pytest.approx(1)


def test_group_centring_is_unbiased_after_correction_and_makes_a_kl_in_the_loss_count_more():
    centred = update("GRPO, group mean, k1 in the reward")
    assert apart(centred * GROUP / (GROUP - 1), TRUTH)[0] < 1e-12
    # the reward loses 1/G of its gradient and the loss nothing: beta acts G/(G - 1) times
    found = update("GRPO, group mean, exact KL in the loss")
    torch.testing.assert_close(found, analytic_gradient((GROUP - 1) / GROUP, BETA), rtol=1e-12, atol=1e-15)


def test_backpropagated_k1_has_no_effect_and_the_exact_kl_and_kl_loss_have_one_gradient():
    without_kl = analytic_gradient(1.0, 0.0)
    torch.testing.assert_close(update("k1 backpropagated"), without_kl, rtol=1e-12, atol=1e-15)
    both = (update(f"{kind} in the loss, token scope") for kind in ("exact KL", "kl_loss"))
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-15)


def rows(heading):
    """Of the table under a heading of the page: name -> the cells beside it."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| (.+?) \|$", section, re.MULTILINE)[1:]
    cells = [[cell.strip() for cell in row.split(" | ")] for row in table]
    return {name: rest for name, *rest in cells if set(name) != {"-", "|"} and not name.startswith("--")}


def test_the_page_lists_these_algorithms_alone():
    section = PAGE.read_text(encoding="utf-8").split("## Correct combinations\n")[1].split("\n## ")[0]
    assert re.findall(r"^- (.+)$", section, re.MULTILINE) == list(RIGHT)
    assert set(rows("Incorrect combinations")) == set(DEVIATING)
    assert set(rows("Trust regions")) == set(REGIONS)


@pytest.mark.parametrize("name", DEVIATING)
def test_the_page_prints_the_deviation(name):
    error, cosine = apart(update(name), TRUTH)
    assert error > 0.03
    assert rows("Incorrect combinations")[name][:2] == [f"{error:.3f}", f"{cosine:.3f}"]


@pytest.mark.parametrize("name", REGIONS)
def test_the_page_prints_what_a_trust_region_costs(name):
    found, removed = REGIONS[name]()
    error, cosine = apart(found, TRUTH)
    assert rows("Trust regions")[name][:3] == [f"{error:.3f}", f"{cosine:.3f}", f"{100 * removed:.1f} %"]
