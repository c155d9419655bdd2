"""The KL term of a TRL trainer, and the weight of each token in the loss, as TRL averages its policy term."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from kleash.errors import OptionError
from kleash.kl_rules import CONTRACTS, refusal, term_spec, trainer_argument
from kleash.losses import AGGREGATIONS, KLTerm
from kleash.registry import look_up


@dataclass(frozen=True, kw_only=True)
class UpdateSize:
    """The sizes by which TRL's losses divide the sum over a micro-batch."""

    micro_batches: int
    """Micro-batches of an update, whose losses are added up."""
    tokens: float
    """Tokens of an update on one process: the divisor of a mean over the update's tokens."""
    max_length: int
    """Largest number of tokens of a response."""


@dataclass(frozen=True, kw_only=True)
class LossType:
    """How one of TRL's losses averages over tokens."""

    aggregation: str
    """The name of this average in ``kleash.losses.AGGREGATIONS``."""
    token_weights: Callable[[Tensor, UpdateSize], Tensor]
    """Mask as numbers, ``[batch, time]`` -> the weight of each token in the loss of an update."""


def _sequence_mean(mask: Tensor, size: UpdateSize) -> Tensor:
    return mask / mask.sum(-1, keepdim=True).clamp(min=1) / len(mask) / size.micro_batches


def _micro_batch_mean(mask: Tensor, size: UpdateSize) -> Tensor:
    return mask / mask.sum().clamp(min=1) / size.micro_batches


def _update_mean(mask: Tensor, size: UpdateSize) -> Tensor:
    return mask / size.tokens


def _divided_by_max_length(mask: Tensor, size: UpdateSize) -> Tensor:
    return mask / (len(mask) * size.max_length) / size.micro_batches


def _sequence_sum(mask: Tensor, size: UpdateSize) -> Tensor:
    return mask / len(mask) / size.micro_batches


LOSS_TYPES: Mapping[str, LossType] = MappingProxyType(
    {
        "grpo": LossType(aggregation="sequence_mean", token_weights=_sequence_mean),
        "sapo": LossType(aggregation="sequence_mean", token_weights=_sequence_mean),
        "bnpo": LossType(aggregation="token_mean", token_weights=_micro_batch_mean),
        "dapo": LossType(aggregation="token_mean", token_weights=_update_mean),
        "cispo": LossType(aggregation="token_mean", token_weights=_update_mean),
        "vespo": LossType(aggregation="token_mean", token_weights=_update_mean),
        "dr_grpo": LossType(aggregation="constant", token_weights=_divided_by_max_length),
        "luspo": LossType(aggregation="sequence_sum", token_weights=_sequence_sum),
        "rloo": LossType(aggregation="sequence_sum", token_weights=_sequence_sum),
    }
)
"""Loss type of TRL's GRPO, or "rloo" -> how it averages over tokens."""


@dataclass(frozen=True, kw_only=True)
class KLOptions:
    """The KL options of a TRL trainer."""

    kl: str
    """"exact", "k1", "k2" or "k3"."""
    place: Any
    """"loss" or "reward"."""
    scope: Any
    """"token" or "sequence"."""
    gradient: Any
    cap: float | None
    loss_type: str
    length: int

    @property
    def exact(self) -> bool:
        """Whether the KL is summed over the vocabulary, not estimated from samples."""
        return self.kl == "exact"

    def term(self, *, off_policy: bool) -> KLTerm:
        """The KL term, with the importance weights that it needs if the samples come from an older policy.

            sampled estimator, scope token        its own token's weight
            sampled estimator, scope sequence     the weight of the response up to and with the token
            exact, scope token                    none: it is exact at the prefixes of the batch
            exact, scope sequence                 the weight of the response before the token

        Raises:
            OptionError: if the term does not have the gradient that it names (``kl_rules``).
            UnknownNameError: if the loss type is not in ``LOSS_TYPES``.
        """
        aggregation = look_up(LOSS_TYPES, self.loss_type, "loss type of TRL").aggregation
        ratio = self._ratio() if off_policy or self.gradient == "ratio_attached" else "none"
        spec = term_spec(
            self.kl,
            CONTRACTS.get(self.kl),
            place=self.place,
            scope=self.scope,
            gradient=self.gradient,
            ratio=ratio,
            cap=self.cap,
            aggregation=aggregation,
            sums_sequences=AGGREGATIONS[aggregation].sums_sequences,
            credit="response",
        )
        reason = refusal(spec, trainer_argument)
        if reason is not None:
            raise OptionError(reason)
        return KLTerm(
            estimator=self.kl,
            place=self.place,
            gradient=self.gradient,
            ratio=ratio,
            cap=self.cap,
            scope=self.scope,
            aggregation=aggregation,
            length=self.length if aggregation == "constant" else None,
        )

    def _ratio(self) -> Any:
        if self.place == "reward":
            return "none"
        if self.exact:
            return "none" if self.scope == "token" else "before"
        return "token" if self.scope == "token" else "prefix"

    def token_weights(
        self, mask: Bool[Tensor, "batch time"], size: UpdateSize
    ) -> Float[Tensor, "batch time"]:
        """The weight of each token's KL in the loss of an update, without beta."""
        return look_up(LOSS_TYPES, self.loss_type, "loss type of TRL").token_weights(mask.float(), size)


def require_unscaled_reward(kl_options: KLOptions, settings: Mapping[str, tuple[Any, Any]]) -> None:
    """Check that TRL does not rescale a reward that contains the KL.

    Args:
        kl_options: the KL options of the trainer.
        settings: name of a setting -> (its value, the required value).

    Raises:
        OptionError: naming a setting that would scale or clip the KL.
    """
    if kl_options.place != "reward":
        return
    for name, (value, required) in settings.items():
        if value != required:
            raise OptionError(
                f"{name} is {value!r}, which would scale or cut the KL in the reward; give {required!r}, or "
                "kl_place='loss'"
            )
