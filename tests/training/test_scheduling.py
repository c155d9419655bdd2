"""Who draws what: the same whatever the number of processes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kleash.errors import CannotRunError
from kleash.models import Prompt
from kleash.training.scheduling import minibatches_of, number, prompts_of_step, share_of, shuffled


def prompts_named(*names):
    return [Prompt(prompt_id=n, token_ids=(n,), text=name, prompt_hash=name) for n, name in enumerate(names)]


def test_orders_equal_recorded_constants():
    """Constants: a resumed run needs the order of the killed one, in any version."""
    assert number(0, "responses", 1) == 7937607415730257021
    assert shuffled(6, 0, "prompts", 0) == [4, 1, 0, 3, 2, 5]
    assert shuffled(6, 1, "prompts", 0) != shuffled(6, 0, "prompts", 0)


@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 5))
def test_each_epoch_contains_every_prompt_once(prompts, per_step, seed):
    given_prompts = prompts_named(*map(str, range(prompts)))
    steps = [prompts_of_step(given_prompts, step, per_step, seed) for step in range(1, 3 * prompts + 1)]
    row = [prompt.prompt_id for taken in steps for prompt in taken]
    assert all(len(taken) == per_step for taken in steps)
    for first in range(0, len(row) - prompts + 1, prompts):
        assert sorted(row[first : first + prompts]) == list(range(prompts))


def test_epochs_have_different_orders():
    given_prompts = prompts_named(*map(str, range(8)))
    epochs = [[p.prompt_id for p in prompts_of_step(given_prompts, step, 8, 0)] for step in (1, 2, 3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_repeated_prompt_in_a_step_draws_other_samples():
    """Copies within a step count on, those of the source included: "a" is there twice."""
    taken = prompts_of_step(prompts_named("a", "b", "a"), 1, 9, seed=0)
    assert sorted(one.copy for one in taken if one.prompt_hash == "a") == [0, 1, 2, 3, 4, 5]
    assert sorted(one.copy for one in taken if one.prompt_hash == "b") == [0, 1, 2]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_processes_share_responses_and_minibatches_evenly(responses, minibatches, processes):
    if processes > -(-responses // minibatches):
        with pytest.raises(CannotRunError, match=f"there are {processes}"):
            share_of(responses, minibatches, 0, processes)
        return
    shares = [share_of(responses, minibatches, process, processes) for process in range(processes)]
    assert [place for share in shares for place in share] == list(range(responses))
    dealt = minibatches_of(responses, minibatches, "any", "key")
    assert sorted(place for minibatch in dealt for place in minibatch) == list(range(responses))
    sizes = [len(minibatch) for minibatch in dealt]
    assert max(sizes) - min(sizes) <= 1
    for minibatch in dealt:
        of_each = [len(set(minibatch) & set(share)) for share in shares]
        assert max(of_each) - min(of_each) <= 2


def test_minibatches_differ_by_key_and_mix_blocks():
    one, other = (minibatches_of(12, 3, 0, "minibatches", step) for step in (1, 2))
    assert one != other
    for minibatch in one:
        assert Counter(place // 3 for place in minibatch) == Counter(range(4)), "one of each block"
