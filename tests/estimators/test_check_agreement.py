import numpy as np
import pytest
import torch
from scipy.stats import linregress

from kleash.divergences import restrict, truncate
from kleash.errors import ShapeError
from kleash.estimators import check_agreement

SEQUENCES, STEPS, VOCAB = 100, 60, 40


class Positions:
    """Positions of high to low entropy, with distributions before and after training and truncation."""

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
def positions(request):
    return Positions(request.param)


def test_consistent_columns_have_no_findings(positions):
    for policy, behaviour, drawn, rounding in (
        (positions.full, positions.full, positions.full, 0.02),
        (positions.trained, positions.full, positions.full, 0.0),
        (positions.warm, positions.warm, positions.warm, 0.02),
        (positions.cut.logp, positions.cut.logp, positions.cut.logp, 0.02),
        (restrict(positions.trained, positions.cut.kept).logp, positions.cut.logp, positions.cut.logp, 0.0),
    ):
        agreement = positions.check(policy, behaviour, drawn, rounding)
        assert agreement.findings == () and agreement.ruled_out == 0
        assert agreement.weight.value == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("trained", [False, True])
def test_a_truncated_behaviour_and_a_full_policy(positions, trained):
    policy = positions.trained if trained else positions.full
    agreement = positions.check(policy, positions.cut.logp, positions.cut.logp)
    assert (
        len(agreement.findings) == 1
        and "the behaviour was truncated to tokens that hold only so much" in agreement.findings[0]
    )
    kept = restrict(policy, positions.cut.kept).log_kept_mass.exp().mean().item()
    assert agreement.weight.value == pytest.approx(kept, abs=0.02)
    assert f"average {agreement.weight.value:.3f} (95 %" in agreement.findings[0]
    assert agreement.above.value > (0.7 if trained else 0.99)


def test_different_temperatures(positions):
    flatter = positions.check(positions.full, positions.warm, positions.warm)
    assert (
        any("it is the flatter one" in finding for finding in flatter.findings) and flatter.slope.value < 0.9
    )
    sharper = positions.check(positions.warm, positions.full, positions.full)
    assert (
        any("it is the sharper one" in finding for finding in sharper.findings) and sharper.slope.value > 1.1
    )


def test_log_probabilities_from_before_the_temperature(positions):
    """Drawn at temperature 0.7, while the engine returns log-probabilities at temperature 1."""
    agreement = positions.check(positions.warm, positions.full, positions.warm)
    assert any(
        "not of the distribution that the tokens were drawn from" in finding for finding in agreement.findings
    )
    assert agreement.weight.ci95[0] > 1.05


def test_full_log_probabilities_of_truncated_draws_are_not_detected(positions):
    agreement = positions.check(positions.full, positions.full, positions.cut.logp)
    assert agreement.findings == () and agreement.weight.value == 1


def test_a_policy_truncated_to_its_own_tokens(positions):
    own_cut = truncate(positions.trained, top_p=0.9)
    agreement = positions.check(own_cut.logp, positions.cut.logp, positions.cut.logp)
    assert (
        agreement.ruled_out > 0
        and f"{agreement.ruled_out} drawn tokens have no probability" in agreement.findings[-1]
    )
    assert np.isfinite(agreement.slope.value)


def test_estimates_and_errors_agree_with_scipy():
    behaviour = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -1.5, -9.0]]).double()
    policy = torch.tensor([[-1.1, -2.3, -0.2], [-2.5, -1.6, torch.nan]]).double()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    agreement = check_agreement(policy, behaviour, mask)
    x, y = (z[mask.bool()].numpy() for z in (behaviour, policy))
    fit = linregress(x, y)
    assert agreement.slope.value == pytest.approx(fit.slope)
    residual = (x - x.mean()) * (y - fit.intercept - fit.slope * x)
    sums = np.array([residual[:3].sum(), residual[3:].sum()])
    robust = np.sqrt(2 * (sums**2).sum()) / ((x - x.mean()) ** 2).sum()
    assert agreement.slope.standard_error == pytest.approx(robust)
    assert agreement.weight.value == pytest.approx(np.exp(y - x).mean()) and agreement.weight.clusters == 2
    assert agreement.above.value == pytest.approx(3 / 5)
    one_cluster = check_agreement(policy, behaviour, mask, prompts=torch.tensor([7, 7]))
    assert one_cluster.weight.clusters == 1 and one_cluster.findings == ()


def test_deviations_within_the_interval_are_not_findings():
    behaviour = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-1.5, -2.5]])
    gaps = torch.tensor([[-0.9, -1.2], [0.2, 0.1], [-0.1, 0.3]])
    agreement = check_agreement(behaviour + gaps, behaviour, torch.ones(3, 2, dtype=torch.bool))
    assert agreement.weight.value < 0.9 and agreement.weight.ci95[1] > 1
    assert agreement.findings == ()


def test_an_empty_mask_gives_nan_and_no_findings():
    x = torch.zeros(2, 3)
    agreement = check_agreement(x, x, torch.zeros(2, 3, dtype=torch.bool))
    assert np.isnan(agreement.weight.value) and np.isnan(agreement.slope.value) and agreement.findings == ()


def test_different_shapes_raise(unhooked):
    x, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(ShapeError, match=r"behaviour_logp \(2, 2\)"):
        check_agreement(x, x[:, :2], mask)
    with pytest.raises(ShapeError, match=r"prompts \(3,\)"):
        check_agreement(x, x, mask, prompts=torch.arange(3))
    with pytest.raises(ShapeError, match=r"token_logp \(3,\)"):
        check_agreement(x[0], x[0], mask[0])
