"""Which prompts a step uses, which process generates their responses, and the minibatches of the updates.

All of it depends only on seed and step, not on the number of processes: two processes draw the same responses as
one, and put the same ones into each minibatch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from kleash.errors import CannotRunError
from kleash.models import Prompt


def number(*key: object) -> int:
    """A 64-bit hash of ``key``, the same on every machine and in every version."""
    text = "/".join(map(str, key))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def shuffled(count: int, *key: object) -> list[int]:
    """A permutation of 0 to ``count - 1`` that depends only on ``key``."""
    return sorted(range(count), key=lambda index: (number(*key, index), index))


def prompts_of_step(prompts: Sequence[Prompt], step: int, how_many: int, seed: int) -> list[Prompt]:
    """The prompts of a step (from 1), taken in order from an endless sequence of shuffled epochs.

    A prompt that occurs twice in a step has another ``copy`` number the second time, and so other samples.
    """
    first = (step - 1) * how_many
    orders: dict[int, list[int]] = {}
    copies: Counter[str] = Counter()
    step_prompts = []
    for position in range(first, first + how_many):
        epoch, within = divmod(position, len(prompts))
        if epoch not in orders:
            orders[epoch] = shuffled(len(prompts), seed, "prompts", epoch)
        prompt = prompts[orders[epoch][within]]
        step_prompts.append(replace(prompt, copy=copies[prompt.prompt_hash]))
        copies[prompt.prompt_hash] += 1
    return step_prompts


def share_of(responses: int, minibatches: int, process: int, processes: int) -> list[int]:
    """The indices of the responses that a process generates and trains on.

    Blocks of ``minibatches`` consecutive responses stay on one process: each block gives one response to each
    minibatch, so that all processes have equally many responses in a minibatch, up to one block.

    Raises:
        CannotRunError: if there are more processes than blocks.
    """
    blocks = -(-responses // minibatches)
    if processes > blocks:
        raise CannotRunError(
            f"{responses} responses in {minibatches} minibatches keep at most {blocks} processes busy, and there are "
            f"{processes}; give more --prompts-per-step, fewer --minibatches, or fewer processes"
        )
    first, last = blocks * process // processes, blocks * (process + 1) // processes
    return list(range(first * minibatches, min(last * minibatches, responses)))


def minibatches_of(responses: int, minibatches: int, *key: object) -> list[list[int]]:
    """The response indices of each minibatch: each block is permuted over the minibatches, depending on ``key``."""
    indices: list[list[int]] = [[] for _ in range(minibatches)]
    for first in range(0, responses, minibatches):
        order = shuffled(minibatches, *key, first)
        for index, minibatch in zip(range(first, min(first + minibatches, responses)), order, strict=False):
            indices[minibatch].append(index)
    return indices
