import pytest
import torch

from kleash.errors import NotProbabilitiesError
from kleash.losses import require_log_probabilities

torch.manual_seed(0)
LOGITS = 5 * torch.randn(4, 6, 50)
LOGP = LOGITS.log_softmax(-1)[..., 7]
ALL = torch.ones(4, 6, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_log_probabilities_are_valid(dtype):
    assert require_log_probabilities(LOGP.to(dtype), ALL) is None
    certain = LOGP.clone()
    certain[0] = 0.0
    certain[1, 1] = -torch.inf
    assert require_log_probabilities(certain.to(dtype), ALL.int()) is None
    peaked = (6 * torch.eye(50) + torch.randn(50, 50)).to(dtype)
    logp = peaked.diagonal() - peaked.logsumexp(-1)
    assert require_log_probabilities(logp, torch.ones(50, dtype=torch.bool)) is None


@pytest.mark.parametrize(
    ("dtype", "little", "much"), [(torch.float32, 2e-6, 1e-3), (torch.bfloat16, 0.125, 0.5)]
)
def test_rounding_errors_above_zero_are_valid(dtype, little, much):
    mask = torch.tensor([True, True])
    assert require_log_probabilities(torch.tensor([little, -2.0]).to(dtype), mask) is None
    with pytest.raises(NotProbabilitiesError, match="is positive, up to"):
        require_log_probabilities(torch.tensor([much, -2.0]).to(dtype), mask)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (LOGP.exp(), "ref_logp lies between .* give their natural logarithms$"),
        (LOGITS[..., 7], "give log_softmax of the logits at the token"),
        (-LOGP, f"positive, up to {-LOGP.min():g}, at 24 of 24 tokens that count"),
        (LOGP.where(LOGP.min() < LOGP, torch.nan), "ref_logp is nan at 1 of 24 .*; mask"),
        (LOGP.where(LOGP.min() < LOGP, torch.inf), "ref_logp is inf at 1 of 24 .*; mask"),
        (torch.zeros(4, 6), "ref_logp is 0 at all 24 tokens that count"),
    ],
)
def test_what_is_no_log_probability_is_an_error(values, message):
    with pytest.raises(NotProbabilitiesError, match=message):
        require_log_probabilities(values, ALL, "ref_logp")


def test_masked_values_are_not_read():
    values, mask = LOGP.clone(), ALL.clone()
    values[2, 3], mask[2, 3] = torch.nan, False
    values[0, 0], mask[0, 0] = 1.0, False
    assert require_log_probabilities(values, mask) is None
    assert require_log_probabilities(torch.full((4, 6), torch.nan), ~ALL) is None
    assert require_log_probabilities(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)) is None
    assert require_log_probabilities(torch.zeros(1, 1), ALL[:1, :1]) is None
