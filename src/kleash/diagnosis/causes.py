"""The causes of a mismatch that the doctor knows: what each means, and the test that confirms or refutes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kleash.store.rollout_results import LikelyCause


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of a mismatch between trainer and engine."""

    meaning: str
    next_test: str
    """What to do next, and which result of it refutes the cause."""
    alike: tuple[str, ...] = ()
    """Causes that the log-probabilities alone, and small data with the models, cannot tell from it."""


CAUSES: Mapping[str, Cause] = MappingProxyType(
    {
        "temperature": Cause(
            meaning="the logits of one side are divided by another temperature",
            next_test="divide the trainer's logits by the sampling temperature and compare again; if the columns still "
            "differ by more than rounding, it is another cause",
            alike=("processed",),
        ),
        "processed": Cause(
            meaning="the engine returns log-probabilities from before temperature and truncation, or logits",
            next_test="set the engine's logprobs_mode to processed_logprobs (vLLM) and generate again; if nothing "
            "changes, it is another cause",
            alike=("temperature",),
        ),
        "truncation": Cause(
            meaning="one side is truncated by top-p, top-k or min-p and renormalised, the other is not",
            next_test="generate with top_p 1, top_k -1 and min_p 0; if one side is still above the other, it is "
            "another cause",
        ),
        "penalty": Cause(
            meaning="one side penalises tokens that stand before (repetition, presence, frequency), or has a bias on "
            "certain tokens, the other does not",
            next_test="generate with repetition_penalty 1, presence_penalty 0, frequency_penalty 0 and no logit_bias; "
            "if these tokens and all others still differ in opposite directions, it is another cause",
        ),
        "sampler": Cause(
            meaning="the columns agree, and the tokens were drawn from another distribution than theirs",
            next_test="print the engine's sampling settings (temperature, top_p, top_k, penalties) and generate with "
            "none; if the sum of the log-probabilities is still off, the tokens are not the engine's",
        ),
        "shift": Cause(
            meaning="one column is shifted by one or a few tokens",
            next_test="compare the logits that score a token: those at position t - 1 predict token t; if the shifted "
            "columns differ in a second batch, it is another cause",
        ),
        "insertion": Cause(
            meaning="inside a response one column has a token more or less, and later values are those of other tokens",
            next_test="compare the token ids of both sides at the first token that differs; if they are equal, it is "
            "another cause",
        ),
        "column": Cause(
            meaning="a column does not hold the natural log-probabilities of these tokens",
            next_test="compare a few values by hand: log p of the drawn token in nats, -0.69 for p = 0.5",
        ),
        "mask": Cause(
            meaning="tokens are counted that the engine did not draw: padding, or the results of tools",
            next_test="set the response mask to 0 at padding and tool results; if other tokens differ too, there is a "
            "second cause",
            alike=("column",),
        ),
        "context": Cause(
            meaning="the two sides read another prompt: a template, or a BOS token on one side only",
            next_test="compare the token ids that the engine received with those that the trainer feeds; if they are "
            "equal, it is another cause",
        ),
        "break": Cause(
            meaning="the errors begin or end at one token, as at the edge of a window or cache, or by rope scaling",
            next_test="score one long response in one pass and in windows of another length; if the break stays at its "
            "token on both sides, it is another cause",
        ),
        "weights": Cause(
            meaning="the two sides have different weights: stale ones, or another adapter",
            next_test="compare a hash of the weights of both sides after an update, adapters included; if they are "
            "equal, it is another cause",
            alike=("dropout", "modules", "precision"),
        ),
        "modules": Cause(
            meaning="one side has the update in a part of the modules only: an adapter without its head, or left out",
            next_test="compare the modules that the engine loads with those of the adapter; if all are there, it is "
            "another cause",
            alike=("weights", "dropout"),
        ),
        "dropout": Cause(
            meaning="the trainer scores in train mode: dropout is on, in the network or in an adapter",
            next_test="score a batch twice; if the trainer's two columns are equal, it is not dropout",
            alike=("weights", "modules"),
        ),
        "reference": Cause(
            meaning="the log-probabilities of the reference are of another model",
            next_test="score a response with the reference checkpoint on its own, adapters disabled; if that equals "
            "the column, it is right",
        ),
        "precision": Cause(
            meaning="one side rounds logits or log-probabilities, or is quantised, more coarsely than --rounding says",
            next_test="compute logits and softmax in float32 on both sides, then without quantised weights or "
            "key-value cache; if the errors stay, it is another cause",
        ),
        "routing": Cause(
            meaning="a share of the tokens has errors far above rounding, as if routed to other experts",
            next_test="replay the engine's expert routing in the trainer; if the same tokens stay far out, or the "
            "model has no experts, it is another cause",
        ),
        "tensor_parallel": Cause(
            meaning="a few tokens are far out, as if a shard of a tensor-parallel layer were missing",
            next_test="score the worst tokens with one device and with several; if they stay far out on one, it is "
            "another cause",
        ),
        "unexplained": Cause(
            meaning="the columns differ by more than rounding, and no cause explains how",
            next_test="score the worst responses twice on each side: a side that does not repeat itself is the one to "
            "look at; then give --policy and --reference",
        ),
    }
)
"""Name -> cause."""
HEALTHY, UNEXPLAINED = "healthy", "unexplained"
"""Not causes: rounding explains the differences; nothing does."""
CERTAIN = 0.98
"""Probability of a cause that the values themselves show, and of any cause at most."""


def likely_cause(
    cause: str, evidence: str, probability: float = CERTAIN, alike: tuple[str, ...] = ()
) -> LikelyCause:
    """The finding of a cause, with its words."""
    known = CAUSES[cause]
    return LikelyCause(
        cause=cause,
        meaning=known.meaning,
        probability=min(CERTAIN, float(probability)),
        evidence=evidence,
        next_test=known.next_test,
        alike=alike,
    )
