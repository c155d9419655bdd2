"""Advantages against the others of a group, and whitening: against loops, verl, and two processes."""

import math

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from whitening_ranks import batches, of_rank

from kleash.errors import OptionError, ShapeError
from kleash.leash import group_advantages, leave_one_out_advantages, whiten

NAN = math.nan


def by_loops(rewards, groups, counts, scale, corrected):
    """One response at a time, with numpy's mean and std of its group."""
    found = []
    for i, reward in enumerate(rewards):
        if not counts[i]:
            found.append(0.0)
            continue
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and counts[j] and j != i]
        group = [reward, *others]
        if not others:
            found.append(0.0 if scale == "none" and not corrected else NAN)
        elif len(set(group)) == 1:
            found.append(0.0)
        else:
            advantage = reward - (np.mean(others) if corrected else np.mean(group))
            found.append(advantage / (np.std(group, ddof=1) if scale == "std" else 1.0))
    return found


@st.composite
def ragged_groups(draw):
    size = draw(st.integers(0, 9))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, -2.5, 7.25]), min_size=size, max_size=size))
    groups = draw(st.lists(st.sampled_from([-5, 0, 3, 10**9]), min_size=size, max_size=size))
    return rewards, groups, draw(st.lists(st.booleans(), min_size=size, max_size=size))


@given(ragged_groups(), st.sampled_from(["none", "std"]), st.booleans())
@settings(max_examples=150)
def test_group_advantages_agree_with_loops(batch, scale, corrected):
    rewards, groups, counts = batch
    tensors = (
        torch.tensor([r if c else NAN for r, c in zip(rewards, counts, strict=True)], dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        torch.tensor(counts, dtype=torch.bool),
    )
    got = group_advantages(*tensors, scale=scale, corrected=corrected).tolist()
    assert got == pytest.approx(by_loops(*batch, scale, corrected), rel=1e-9, abs=1e-9, nan_ok=True)
    alone = leave_one_out_advantages(*tensors).tolist()
    assert alone == pytest.approx(by_loops(*batch, "none", True), rel=1e-9, abs=1e-9, nan_ok=True)


def test_group_advantages_of_a_small_example():
    rewards = torch.tensor([1.0, 2.0, 6.0, 0.0, 4.0, 8.0])
    assert leave_one_out_advantages(rewards, 3).tolist() == [-3.0, -1.5, 4.5, -6.0, 0.0, 6.0]
    assert group_advantages(rewards, 3, corrected=False).tolist() == [-2.0, -1.0, 3.0, -4.0, 0.0, 4.0]
    assert group_advantages(rewards[3:], 3, scale="std", corrected=False).tolist() == [-1.0, 0.0, 1.0]
    assert group_advantages(rewards[3:], 3, scale="std").tolist() == [-1.5, 0.0, 1.5]
    unequal = torch.tensor([9, 7, 9, 9, 7, 7], dtype=torch.int32)
    assert leave_one_out_advantages(rewards, unequal).tolist() == pytest.approx([-2, -4, 5.5, -3.5, -1, 5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(dtype):
    rewards = torch.full((21,), 0.1, dtype=dtype)
    for scale in ("none", "std"):
        found = group_advantages(rewards, 7, scale=scale)
        assert (found == 0).all() and found.dtype == torch.promote_types(dtype, torch.float32)
    assert (whiten(rewards, torch.ones(21, dtype=torch.bool)) == 0).all()
    nearly = rewards.float()
    nearly[0] += 1e-6
    first = group_advantages(nearly, 7, scale="std", corrected=False)[0].item()
    assert first == pytest.approx(2.268, rel=0.1)


def test_groups_of_one_response_and_with_nan_rewards():
    rewards = torch.tensor([5.0, NAN, 1.0, math.inf, math.inf, 2.0, 3.0])
    groups = torch.tensor([0, 1, 1, 2, 2, 3, 3])
    found = leave_one_out_advantages(rewards, groups).tolist()
    assert found == pytest.approx([NAN] * 5 + [-1, 1], nan_ok=True)
    assert group_advantages(rewards, groups, corrected=False)[0] == 0
    assert group_advantages(rewards, groups, scale="std", corrected=False)[0].isnan()
    counts = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    assert leave_one_out_advantages(rewards, groups, counts).tolist() == [0.0] * 5 + [-1, 1]
    assert leave_one_out_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_group_advantages_agree_with_verl(verl):
    torch.manual_seed(0)
    rewards, ids = torch.randn(7, dtype=torch.float64), [4, 4, 2, 4, 2, 2, 2]
    groups, index = torch.tensor(ids), np.array([str(i) for i in ids], dtype=object)
    given_ = {"response_mask": torch.ones(7, 1, dtype=torch.float64), "index": index}

    def theirs(function, **options):  # both change their argument
        return function(rewards.clone().unsqueeze(-1), **given_, **options)[0].squeeze(-1)

    grpo, rloo = verl.core.compute_grpo_outcome_advantage, verl.core.compute_rloo_outcome_advantage
    published = group_advantages(rewards, groups, scale="std", corrected=False)
    torch.testing.assert_close(theirs(grpo, epsilon=0.0), published)
    centred = group_advantages(rewards, groups, corrected=False)
    torch.testing.assert_close(theirs(grpo, norm_adv_by_std_in_grpo=False), centred)
    torch.testing.assert_close(theirs(rloo), leave_one_out_advantages(rewards, groups))


# --- whitening ---


def test_whitening_of_a_small_example():
    values = torch.tensor([[1.0, NAN, 3.0], [5.0, math.inf, NAN]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    assert whiten(values, mask).tolist() == [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert whiten(values[0], mask[0]).tolist() == pytest.approx([-math.sqrt(0.5), 0.0, math.sqrt(0.5)])
    assert whiten(torch.tensor([3.0, NAN]), torch.tensor([1, 0])).tolist() == [0.0, 0.0]
    assert whiten(values, torch.zeros(2, 3, dtype=torch.bool)).eq(0).all()
    assert whiten(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).shape == (0,)
    unreadable = whiten(torch.tensor([1.0, NAN, 2.0]), torch.tensor([1, 1, 0]))
    assert unreadable[:2].isnan().all() and unreadable[2] == 0


def test_whitening_is_over_all_processes(tmp_path):
    mp.start_processes(of_rank, args=(tmp_path,), nprocs=2, start_method="fork")
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name, (values, mask) in batches().items():
        together = torch.cat([ranks[0][name][0], ranks[1][name][0]])
        kept = values[mask].numpy()
        spread = np.std(kept, ddof=1) if np.ptp(kept) else 1.0
        expected = np.where(mask, (values.numpy() - kept.mean()) / spread, 0.0)
        np.testing.assert_allclose(together, expected, rtol=1e-9, atol=1e-8 if name == "all equal" else 1e-12)
        assert name != "all equal" or (together == 0).all()
        for rank in ranks:
            assert rank[name][1].item() == pytest.approx(kept.sum() / mask.any(-1).sum().item())
            assert rank[name][2] == mask.any(-1).sum()


FOUR = torch.ones(4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: group_advantages(FOUR, np.int64(3)), OptionError, "4 responses in groups of 3; give a size"),
        (lambda: group_advantages(FOUR, 0), OptionError, "in groups of 0"),
        (lambda: group_advantages(FOUR, torch.ones(3, dtype=torch.int64)), ShapeError, r"groups \(3,\)"),
        (lambda: group_advantages(FOUR, 2, scale="batch"), OptionError, "scale is 'batch'; there are none"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_invalid_group_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
