"""Which prompts a step takes: by seed and position alone."""

from hypothesis import given
from hypothesis import strategies as st

from kleash.training.job_schedule import prompt_indices


def test_order_equals_recorded_constants():
    """Constants: a resumed run needs the order of the killed one, in any version."""
    assert prompt_indices(6, range(8), 0) == [0, 3, 4, 1, 5, 2, 3, 1] != prompt_indices(6, range(8), 1)


@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 5))
def test_each_epoch_contains_every_prompt_once(prompts, per_step, seed):
    steps = [range(step * per_step, (step + 1) * per_step) for step in range(3 * prompts)]
    row = [index for positions in steps for index in prompt_indices(prompts, positions, seed)]
    assert row == prompt_indices(prompts, range(len(row)), seed)
    epochs = [row[first : first + prompts] for first in range(0, len(row) - prompts + 1, prompts)]
    assert all(sorted(epoch) == list(range(prompts)) for epoch in epochs)
    assert prompts < 8 or len({tuple(epoch) for epoch in epochs}) > 1
