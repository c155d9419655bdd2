"""Who does what: which prompts a step takes, which process answers them, and in which order they are learned from.

Everything here follows from seed and step alone, and from no number of processes: two of them draw the same
responses as one, and put the same ones into each minibatch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from kleash.errors import CannotRunError
from kleash.models import Prompt


def number(*key: object) -> int:
    """64 bits that follow from ``key``, the same on every machine and in every version."""
    text = "/".join(map(str, key))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def shuffled(count: int, *key: object) -> list[int]:
    """0 to ``count - 1`` in an order that follows from ``key``."""
    return sorted(range(count), key=lambda place: (number(*key, place), place))


def prompts_of_step(prompts: Sequence[Prompt], step: int, how_many: int, seed: int) -> list[Prompt]:
    """The prompts of a step, which counts from 1: the next ones of an endless row of shuffled epochs.

    A prompt that comes twice in a step is another copy of itself the second time, and draws other samples.
    """
    first = (step - 1) * how_many
    orders: dict[int, list[int]] = {}
    copies: Counter[str] = Counter()
    taken = []
    for place in range(first, first + how_many):
        epoch, within = divmod(place, len(prompts))
        if epoch not in orders:
            orders[epoch] = shuffled(len(prompts), seed, "prompts", epoch)
        prompt = prompts[orders[epoch][within]]
        taken.append(replace(prompt, copy=copies[prompt.prompt_hash]))
        copies[prompt.prompt_hash] += 1
    return taken


def share_of(responses: int, minibatches: int, process: int, processes: int) -> list[int]:
    """The places of the responses that a process draws and learns from.

    Blocks of ``minibatches`` neighbours stay together: each gives one response to each minibatch, so that every
    process has as many in it as any other, give or take one block.

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
    """The places of a step's responses, dealt out anew for each ``key``: a block's neighbours to different ones."""
    dealt: list[list[int]] = [[] for _ in range(minibatches)]
    for first in range(0, responses, minibatches):
        order = shuffled(minibatches, *key, first)
        for place, which in zip(range(first, min(first + minibatches, responses)), order, strict=False):
            dealt[which].append(place)
    return dealt
