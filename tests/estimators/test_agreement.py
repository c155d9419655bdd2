import numpy as np
import pytest
import torch
from scipy.stats import linregress

from kleash.divergences import restrict, truncate
from kleash.errors import ShapeError
from kleash.estimators import check_agreement

SEQUENCES, STEPS, VOCAB = 100, 60, 40


class World:
    """Positions from certain to torn, and what may be asked of them."""

    def __init__(self, seed):
        self.draws = torch.Generator().manual_seed(seed)
        sharpness = 1 + 4 * torch.rand(SEQUENCES, STEPS, 1, generator=self.draws)
        self.logits = sharpness * torch.randn(SEQUENCES, STEPS, VOCAB, generator=self.draws)
        self.full = self.logits.log_softmax(-1)
        self.warm = (self.logits / 0.7).log_softmax(-1)
        self.cut = truncate(self.full, top_p=0.9)

    def noise(self, *shape):
        return torch.randn(*shape, generator=self.draws)

    @property
    def trained(self):
        return (self.logits + 0.2 * self.noise(SEQUENCES, STEPS, VOCAB)).log_softmax(-1)

    def check(self, policy, behaviour, drawn_from, rounding=0.0):
        flat = torch.multinomial(drawn_from.exp().flatten(0, 1), 1, generator=self.draws)
        tokens = flat.view(SEQUENCES, STEPS, 1)
        p, mu = (x.gather(-1, tokens).squeeze(-1) for x in (policy, behaviour))
        mask = torch.ones(p.shape, dtype=torch.bool)
        return check_agreement(p, mu + rounding * self.noise(*mu.shape), mask)


@pytest.fixture(params=range(3))
def world(request):
    return World(request.param)


def test_sound_columns_give_no_finding(world):
    for policy, behaviour, drawn, rounding in (
        (world.full, world.full, world.full, 0.02),
        (world.trained, world.full, world.full, 0.0),
        (world.warm, world.warm, world.warm, 0.02),
        (world.cut.logp, world.cut.logp, world.cut.logp, 0.02),
        (restrict(world.trained, world.cut.kept).logp, world.cut.logp, world.cut.logp, 0.0),
    ):
        got = world.check(policy, behaviour, drawn, rounding)
        assert got.findings == () and got.ruled_out == 0
        assert got.weight.value == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("trained", [False, True])
def test_a_truncated_behaviour_against_a_full_policy(world, trained):
    policy = world.trained if trained else world.full
    got = world.check(policy, world.cut.logp, world.cut.logp)
    assert (
        len(got.findings) == 1 and "the behaviour was cut to tokens that hold only so much" in got.findings[0]
    )
    kept = restrict(policy, world.cut.kept).log_kept_mass.exp().mean().item()
    assert got.weight.value == pytest.approx(kept, abs=0.02)
    assert f"average {got.weight.value:.3f} (95 %" in got.findings[0]
    assert got.above.value > (0.7 if trained else 0.99)


def test_temperatures_that_differ(world):
    flatter = world.check(world.full, world.warm, world.warm)
    assert (
        any("it is the flatter one" in finding for finding in flatter.findings) and flatter.slope.value < 0.9
    )
    sharper = world.check(world.warm, world.full, world.full)
    assert (
        any("it is the sharper one" in finding for finding in sharper.findings) and sharper.slope.value > 1.1
    )


def test_log_probabilities_from_before_the_temperature(world):
    """Drawn at 0.7, and the engine returns those of temperature 1."""
    got = world.check(world.warm, world.full, world.warm)
    assert any(
        "not of the distribution that the tokens were drawn from" in finding for finding in got.findings
    )
    assert got.weight.ci95[0] > 1.05


def test_what_cannot_be_told_is_not_told(world):
    got = world.check(world.full, world.full, world.cut.logp)
    assert got.findings == () and got.weight.value == 1


def test_a_policy_cut_to_its_own_tokens(world):
    own = truncate(world.trained, top_p=0.9)
    got = world.check(own.logp, world.cut.logp, world.cut.logp)
    assert got.ruled_out > 0 and f"{got.ruled_out} drawn tokens have no probability" in got.findings[-1]
    assert np.isfinite(got.slope.value)


def test_the_numbers_and_their_errors_by_hand():
    behaviour = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -1.5, -9.0]]).double()
    policy = torch.tensor([[-1.1, -2.3, -0.2], [-2.5, -1.6, torch.nan]]).double()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    got = check_agreement(policy, behaviour, mask)
    x, y = (z[mask.bool()].numpy() for z in (behaviour, policy))
    fit = linregress(x, y)
    assert got.slope.value == pytest.approx(fit.slope)
    residual = (x - x.mean()) * (y - fit.intercept - fit.slope * x)
    sums = np.array([residual[:3].sum(), residual[3:].sum()])
    robust = np.sqrt(2 * (sums**2).sum()) / ((x - x.mean()) ** 2).sum()
    assert got.slope.standard_error == pytest.approx(robust)
    assert got.weight.value == pytest.approx(np.exp(y - x).mean()) and got.weight.clusters == 2
    assert got.above.value == pytest.approx(3 / 5)
    together = check_agreement(policy, behaviour, mask, prompts=torch.tensor([7, 7]))
    assert together.weight.clusters == 1 and together.findings == ()


def test_what_the_interval_does_not_exclude_is_no_finding():
    behaviour = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-1.5, -2.5]])
    gaps = torch.tensor([[-0.9, -1.2], [0.2, 0.1], [-0.1, 0.3]])
    got = check_agreement(behaviour + gaps, behaviour, torch.ones(3, 2, dtype=torch.bool))
    assert got.weight.value < 0.9 and got.weight.ci95[1] > 1
    assert got.findings == ()


def test_over_nothing():
    x = torch.zeros(2, 3)
    got = check_agreement(x, x, torch.zeros(2, 3, dtype=torch.bool))
    assert np.isnan(got.weight.value) and np.isnan(got.slope.value) and got.findings == ()


def test_shapes_that_differ(unhooked):
    x, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(
        ShapeError, match=r"token_logp is \(2, 3\), behaviour_logp \(2, 2\), mask \(2, 3\) and prompts"
    ):
        check_agreement(x, x[:, :2], mask)
    with pytest.raises(ShapeError, match=r"and prompts \(3,\); give \[batch, time\] three times"):
        check_agreement(x, x, mask, prompts=torch.arange(3))
    with pytest.raises(ShapeError, match=r"token_logp is \(3,\)"):
        check_agreement(x[0], x[0], mask[0])
