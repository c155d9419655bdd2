"""``--show-reference``: one response of each model to the prompts with the largest KL, for the report."""

from collections.abc import Sequence
from dataclasses import replace

from kleash.engines.local import sampling_of
from kleash.measuring.largest_drift import shorten_text
from kleash.measuring.shard_scoring import OpenRun
from kleash.models import generate, read_prompts
from kleash.store.measurement import PromptDrift

SHOWN = 20
"""Prompts, those with the largest KL, that are shown with responses."""


def with_responses(run: OpenRun, prompts: Sequence[PromptDrift]) -> tuple[PromptDrift, ...]:
    """The prompts, of which the first have the policy's first response and one that the reference draws.

    The reference draws as the policy did, with the numbers of the same seed. Nothing is measured on it.
    """
    job, shown = run.job, {prompt.prompt_id for prompt in prompts[:SHOWN]}
    source = read_prompts(job.source[1], run.pair, limit=job.limit, reading=job)
    reference = replace(run.pair.reference, context_length=run.pair.context_length)
    sampling = replace(sampling_of(job), samples_per_prompt=1)
    chosen = [prompt for prompt in source if prompt.prompt_id in shown]
    drawn = {
        sequence.prompt_id: shorten_text(sequence.response_text)
        for sequence in generate(reference, chosen, sampling, batch_tokens=job.batch_tokens)
    }
    first: dict[int, str] = {}
    for part in run.folder.parts("sequences", ["prompt_id", "response"]):
        for prompt_id, response in zip(*part.values(), strict=True):
            if prompt_id in shown:
                first.setdefault(int(prompt_id), shorten_text(response))
    return tuple(
        replace(
            prompt,
            policy_response=first.get(prompt.prompt_id),
            reference_response=drawn.get(prompt.prompt_id),
        )
        for prompt in prompts
    )
