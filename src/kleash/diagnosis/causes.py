"""The causes of a mismatch that the doctor knows: what each means, and the test that confirms it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of a mismatch between trainer and engine."""

    meaning: str
    next_test: str
    """What to do next, to confirm or to repair."""
    alike: tuple[str, ...] = ()
    """Causes that the log-probabilities alone, without the models, cannot tell from it."""


CAUSES: Mapping[str, Cause] = MappingProxyType(
    {
        "temperature": Cause(
            meaning="the logits of one side are divided by another temperature",
            next_test="divide the trainer's logits by the sampling temperature, and compare the columns again",
            alike=("processed",),
        ),
        "processed": Cause(
            meaning="the engine returns log-probabilities from before temperature and truncation, or logits",
            next_test="set the engine's logprobs_mode to processed_logprobs (vLLM), and generate again",
            alike=("temperature",),
        ),
        "truncation": Cause(
            meaning="one side is truncated by top-p, top-k or min-p and renormalised, the other is not",
            next_test="generate with top_p 1, top_k -1 and min_p 0, or truncate the trainer to the engine's tokens",
        ),
        "shift": Cause(
            meaning="one column is shifted by one or a few tokens",
            next_test="compare the logits that score a token: those at position t - 1 predict token t",
        ),
        "column": Cause(
            meaning="a column does not hold the natural log-probabilities of these tokens",
            next_test="compare a few values by hand: log p of the token in nats, -0.69 for a probability of a half",
        ),
        "mask": Cause(
            meaning="tokens are counted that the engine did not draw: padding, or the results of tools",
            next_test="set the response mask to 0 at padding and tool results, and compare the columns again",
        ),
        "context": Cause(
            meaning="the two sides read another prompt: a template, or a BOS token on one side only",
            next_test="compare the token ids that the engine received with those that the trainer feeds",
        ),
        "weights": Cause(
            meaning="the two sides have different weights: stale ones, or another adapter",
            next_test="compare a hash of the weights of both sides after an update, adapters included",
        ),
        "reference": Cause(
            meaning="the log-probabilities of the reference are of another model",
            next_test="score a response with the reference checkpoint on its own, adapters disabled",
        ),
        "precision": Cause(
            meaning="one side rounds logits or log-probabilities, or is quantised, more coarsely than --rounding says",
            next_test="compute logits and softmax in float32 on both sides; then generate without quantised weights or "
            "key-value cache",
        ),
        "routing": Cause(
            meaning="a share of the tokens has errors far above rounding, as if routed to other experts",
            next_test="replay the engine's expert routing in the trainer, or compare the experts chosen",
        ),
        "tensor_parallel": Cause(
            meaning="a few tokens are far out, as if a shard of a tensor-parallel layer were missing",
            next_test="score the worst tokens with one device and with several, and compare",
        ),
    }
)
"""Name -> cause."""
HEALTHY = "healthy"
"""Not a cause: rounding explains the differences."""
