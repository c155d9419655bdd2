"""Which KL is trained: its term by name, and each token's share of the loss as TRL shares out its policy term."""

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
class Window:
    """What a micro-batch is a part of."""

    parts: int
    """Micro-batches whose losses are added up to an update."""
    tokens: float
    """Tokens of an update, of one process: what a mean over the update's tokens divides by."""
    length: int
    """The longest response that may be generated."""


@dataclass(frozen=True, kw_only=True)
class LossType:
    """How one of TRL's losses averages its tokens."""

    aggregation: str
    """The same by the name that ``kleash.losses`` knows."""
    share: Callable[[Tensor, Window], Tensor]
    """From 1 where a token counts and 0 elsewhere to what each adds to the loss of an update per nat."""


def _per_sequence(counts: Tensor, window: Window) -> Tensor:
    return counts / counts.sum(-1, keepdim=True).clamp(min=1) / len(counts) / window.parts


def _per_part(counts: Tensor, window: Window) -> Tensor:
    return counts / counts.sum().clamp(min=1) / window.parts


def _per_update(counts: Tensor, window: Window) -> Tensor:
    return counts / window.tokens


def _per_length(counts: Tensor, window: Window) -> Tensor:
    return counts / (len(counts) * window.length) / window.parts


def _summed(counts: Tensor, window: Window) -> Tensor:
    return counts / len(counts) / window.parts


LOSS_TYPES: Mapping[str, LossType] = MappingProxyType(
    {
        "grpo": LossType(aggregation="sequence_mean", share=_per_sequence),
        "sapo": LossType(aggregation="sequence_mean", share=_per_sequence),
        "bnpo": LossType(aggregation="token_mean", share=_per_part),
        "dapo": LossType(aggregation="token_mean", share=_per_update),
        "cispo": LossType(aggregation="token_mean", share=_per_update),
        "vespo": LossType(aggregation="token_mean", share=_per_update),
        "dr_grpo": LossType(aggregation="constant", share=_per_length),
        "luspo": LossType(aggregation="sequence_sum", share=_summed),
        "rloo": LossType(aggregation="sequence_sum", share=_summed),
    }
)
"""TRL's names of GRPO's losses, and RLOO's one, to how they average."""


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
        """Whether whole distributions are compared."""
        return self.kl == "exact"

    def term(self, *, off_policy: bool) -> KLTerm:
        """The term, with the importance weights that it needs where the samples are an older policy's.

            sampled estimator, scope token        its own token's weight
            sampled estimator, scope sequence     the weight of the response up to and with the token
            exact, scope token                    none: it stands at prefixes as they were met
            exact, scope sequence                 the weight of the response before the token

        Raises:
            OptionError: if it does not train what it names.
            UnknownNameError: if TRL knows a loss that is not known here.
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

    def share(self, mask: Bool[Tensor, "batch time"], window: Window) -> Float[Tensor, "batch time"]:
        """What each token adds to the loss of an update, per nat of its KL and without beta."""
        return look_up(LOSS_TYPES, self.loss_type, "loss type of TRL").share(mask.float(), window)


def refuse_reward(kl_options: KLOptions, settings: Mapping[str, tuple[Any, Any]]) -> None:
    """See that rewards with a KL in them are averaged as they are.

    Args:
        kl_options: the KL options of the trainer.
        settings: name -> (what it is, what it has to be).

    Raises:
        OptionError: naming what would scale or cut the KL.
    """
    if kl_options.place != "reward":
        return
    for name, (value, needed) in settings.items():
        if value != needed:
            raise OptionError(
                f"{name} is {value!r}, which would scale or cut the KL in the reward; give {needed!r}, or "
                "kl_place='loss'"
            )
