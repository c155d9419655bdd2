"""The KL term of a TRL trainer, and the weight of each token in the loss, as TRL averages its policy term."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from kleash.errors import OptionError
from kleash.kl_rules import CONTRACTS, refusal, spell_trainer_argument, term_spec
from kleash.losses import AGGREGATIONS, KLTerm
from kleash.registry import look_up


@dataclass(frozen=True, kw_only=True)
class LossType:
    """How one of TRL's losses averages over tokens."""

    aggregation: str
    """The name of this average in ``kleash.losses.AGGREGATIONS``."""
    token_weights: Callable[[Tensor, float, int], Tensor]
    """The weight of each token in the loss of a micro-batch, ``[batch, time]``; the loss of an update is a mean over
    its micro-batches. Of: the mask as numbers; the mean number of tokens in a micro-batch of the update; the largest
    length of a response."""


_SEQUENCE_MEAN = LossType(
    aggregation="sequence_mean",
    token_weights=lambda mask, tokens, length: mask / mask.sum(-1, keepdim=True).clamp(min=1) / len(mask),
)
_UPDATE_MEAN = LossType(aggregation="token_mean", token_weights=lambda mask, tokens, length: mask / tokens)
_SEQUENCE_SUM = LossType(
    aggregation="sequence_sum", token_weights=lambda mask, tokens, length: mask / len(mask)
)
LOSS_TYPES: Mapping[str, LossType] = MappingProxyType(
    {
        "grpo": _SEQUENCE_MEAN,
        "sapo": _SEQUENCE_MEAN,
        "bnpo": LossType(
            aggregation="token_mean",
            token_weights=lambda mask, tokens, length: mask / mask.sum().clamp(min=1),
        ),
        "dapo": _UPDATE_MEAN,
        "cispo": _UPDATE_MEAN,
        "vespo": _UPDATE_MEAN,
        "dr_grpo": LossType(
            aggregation="constant",
            token_weights=lambda mask, tokens, length: mask / (len(mask) * length),
        ),
        "luspo": _SEQUENCE_SUM,
        "rloo": _SEQUENCE_SUM,
    }
)
"""Loss type of TRL's GRPO, or "rloo" -> how it averages over tokens."""
UNSCALED: Mapping[str, Any] = MappingProxyType(
    {
        "scale_rewards": "none",
        "multi_objective_aggregation": "sum_then_normalize",
        "normalize_advantages": False,
    }
)
"""Setting of TRL's GRPO (the first two) or RLOO -> the value with which a reward is left alone."""


# Many arguments, since they are options of a trainer; all by keyword.
def kl_term(
    *,
    kl: str,
    place: Any,
    scope: Any,
    gradient: Any,
    cap: float | None,
    loss_type: str,
    length: int,
    off_policy: bool,
) -> KLTerm:
    """The KL term of a TRL trainer, with the importance weights that it needs if an older policy drew the samples.

        sampled estimator, scope token        its own token's weight
        sampled estimator, scope sequence     the weight of the response up to and with the token
        exact, scope token                    none: it is exact at the prefixes of the batch
        exact, scope sequence                 the weight of the response before the token

    Args:
        kl: "exact", "k1", "k2" or "k3".
        place: "loss" or "reward".
        scope: "token" or "sequence".
        gradient: as a field of ``KLTerm``, like ``cap``.
        cap: the largest importance weight.
        loss_type: a key of ``LOSS_TYPES``.
        length: largest number of tokens of a response.
        off_policy: whether some updates use samples of an older policy.

    Raises:
        OptionError: if the term does not have the gradient that it names (``kl_rules``).
        UnknownNameError: if the loss type is not in ``LOSS_TYPES``.
    """
    aggregation = look_up(LOSS_TYPES, loss_type, "loss type of TRL").aggregation
    if place == "reward" or not (off_policy or gradient == "ratio_attached"):
        ratio = "none"
    elif kl == "exact":
        ratio = "none" if scope == "token" else "before"
    else:
        ratio = "token" if scope == "token" else "prefix"
    spec = term_spec(
        kl,
        CONTRACTS.get(kl),
        place=place,
        scope=scope,
        gradient=gradient,
        ratio=ratio,
        cap=cap,
        aggregation=loss_type,
        sums_sequences=AGGREGATIONS[aggregation].sums_sequences,
        credit="response",
    )
    reason = refusal(spec, spell_trainer_argument)
    if reason is not None:
        raise OptionError(reason)
    return KLTerm(
        estimator=kl,
        place=place,
        gradient=gradient,
        ratio=ratio,
        cap=cap,
        scope=scope,
        aggregation=aggregation,
        length=length if aggregation == "constant" else None,
    )


def require_unscaled_reward(term: KLTerm, trainer: Any) -> None:
    """Check that TRL does not rescale a reward that contains the KL.

    Args:
        term: the KL term of the trainer.
        trainer: of TRL, with those of the settings ``UNSCALED`` that it knows as its attributes.

    Raises:
        OptionError: naming a setting that would scale or clip the KL.
    """
    for name, required in UNSCALED.items():
        value = getattr(trainer, name, required)
        if term.place == "reward" and value != required:
            raise OptionError(
                f"{name} is {value!r}, which would scale or cut the KL in the reward; give {required!r}, or "
                "kl_place='loss'"
            )
