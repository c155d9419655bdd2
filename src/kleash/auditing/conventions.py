"""How functions that compute a KL are called, and what comes back: a record for each way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from kleash.auditing.situations import Situation
from kleash.divergences import DIVERGENCES
from kleash.errors import OptionError
from kleash.linear import Head
from kleash.registry import look_up

Call = Callable[[Callable[..., Any], Situation], Tensor]
Place = Literal["loss", "reward", "metric"]
Gives = Literal["vocabulary", "token", "sequence", "mean"]
Sees = Literal["tokens", "distributions", "hidden"]


@dataclass(frozen=True, kw_only=True)
class Convention:
    """How a function is called, and what its result is meant to be.

    Raises:
        OptionError: if ``place``, ``gives``, ``sees`` or ``sign`` is none of what it may be.
        UnknownNameError: if ``claims`` is no divergence of the table.
    """

    name: str
    summary: str
    """The call in a line: ``f(token_logp, token_logq) -> [sequences, steps]``."""
    call: Call
    """``call(function, situation)``: calls ``function`` and hands on the tensor that it gives."""
    place: Place = "loss"
    """"loss": the result is differentiated. "reward": it is detached and multiplies the score,
    ``grad log p``, of the token and those before it. "metric": only its value counts."""
    gives: Gives = "token"
    """"vocabulary" [sequences, steps, vocab], to be summed over the last axis; "token" [sequences, steps];
    "sequence" [sequences], the sum of each response; "mean", one number, the mean over the mask."""
    sees: Sees = "tokens"
    """What it is given: sampled tokens' log-probabilities, whole distributions, or hidden states."""
    sign: Literal[1, -1] = 1
    """-1 where it is meant to return minus the divergence."""
    takes_behaviour: bool = False
    """Whether it is told from what the tokens were drawn, so that it could be right off-policy."""
    takes_mask: bool = False
    claims: str = "kl"
    """The divergence it should be: a key of ``DIVERGENCES``; p is the policy, q the reference."""

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        for field, allowed in (
            ("place", ("loss", "reward", "metric")),
            ("gives", ("vocabulary", "token", "sequence", "mean")),
            ("sees", ("tokens", "distributions", "hidden")),
            ("sign", (1, -1)),
        ):
            if getattr(self, field) not in allowed:
                choices = ", ".join(map(str, allowed))
                raise OptionError(f"a convention's {field} is {getattr(self, field)!r}; there are {choices}")
        look_up(DIVERGENCES, self.claims, "divergence")


SHAPES: Mapping[str, str] = MappingProxyType(
    {
        "vocabulary": "[sequences, steps, vocab], summed over the last axis",
        "token": "[sequences, steps]",
        "sequence": "[sequences]",
        "mean": "mean over the mask",
    }
)


def from_fields(name: str, *taken: str, **options: Any) -> Convention:
    """A function called with these fields of the situation, in this order."""
    gives = SHAPES[options.get("gives", "token")]
    return Convention(
        name=name,
        summary=f"f({', '.join(taken)}) -> {gives}",
        call=lambda function, situation: function(*(getattr(situation, field) for field in taken)),
        takes_behaviour="behaviour_logp" in taken,
        takes_mask="mask" in taken,
        **options,
    )


def packed(name: str, *taken: str, **options: Any) -> Convention:
    """A function of one axis: these fields of all tokens of all responses, one response after the other."""

    def call(function: Callable[..., Any], given: Situation) -> Any:
        flat = (getattr(given, field).flatten(0, 1) for field in taken)
        found = function(*flat)
        shape = given.tokens.shape
        if isinstance(found, Tensor) and found.shape == (given.tokens.numel(),):
            return found.reshape(shape)
        return found

    return Convention(
        name=name,
        summary=f"f({', '.join(taken)}) -> [tokens], all responses in a row",
        call=call,
        takes_behaviour="behaviour_logp" in taken,
        takes_mask="mask" in taken,
        **options,
    )


PAIR = ("token_logp", "token_logq")


def _sampled() -> list[Convention]:
    return [
        from_fields("loss", *PAIR),
        from_fields("loss_with_mask", *PAIR, "mask"),
        from_fields("loss_with_behaviour", *PAIR, "behaviour_logp"),
        from_fields("loss_with_behaviour_and_mask", *PAIR, "behaviour_logp", "mask"),
        from_fields("sequence_loss", *PAIR, gives="sequence"),
        from_fields("sequence_loss_with_mask", *PAIR, "mask", gives="sequence"),
        from_fields("sequence_loss_with_behaviour", *PAIR, "behaviour_logp", gives="sequence"),
        from_fields("mean_loss", *PAIR, gives="mean"),
        from_fields("mean_loss_with_mask", *PAIR, "mask", gives="mean"),
        from_fields("mean_loss_with_behaviour", *PAIR, "behaviour_logp", gives="mean"),
        from_fields("mean_loss_with_behaviour_and_mask", *PAIR, "behaviour_logp", "mask", gives="mean"),
        from_fields("reward", *PAIR, place="reward"),
        from_fields("reward_with_mask", *PAIR, "mask", place="reward"),
        from_fields("sequence_reward", *PAIR, place="reward", gives="sequence"),
        from_fields("metric", *PAIR, place="metric"),
        packed("packed_loss", *PAIR),
        packed("packed_loss_with_mask", *PAIR, "mask"),
        packed("packed_reward", *PAIR, place="reward"),
        packed("packed_metric", *PAIR, place="metric"),
        from_fields("mean_metric_with_mask", *PAIR, "mask", place="metric", gives="mean"),
    ]


def _whole() -> list[Convention]:
    def of_head_records(function: Callable[..., Any], given: Situation) -> Tensor:
        return function(given.hidden_p, Head(given.head_p), given.hidden_q, Head(given.head_q))

    whole = {"sees": "distributions"}
    return [
        from_fields("log_probabilities", "logp", "logq", **whole),
        from_fields("mean_log_probabilities", "logp", "logq", gives="mean", **whole),
        from_fields("log_probabilities_with_mask", "logp", "logq", "mask", **whole),
        from_fields("probabilities", "probs_p", "probs_q", **whole),
        from_fields("kl_div", "logq", "probs_p", gives="vocabulary", **whole),
        from_fields("kl_div_log_target", "logq", "logp", gives="vocabulary", **whole),
        from_fields("logits", "logits_p", "logits_q", **whole),
        from_fields("logits_with_mask", "logits_p", "logits_q", "mask", **whole),
        from_fields("mean_logits", "logits_p", "logits_q", gives="mean", **whole),
        from_fields("mean_logits_with_mask", "logits_p", "logits_q", "mask", gives="mean", **whole),
        from_fields("distillation", "logits_p", "logits_q", claims="reverse_kl", **whole),
        from_fields("mean_distillation", "logits_p", "logits_q", claims="reverse_kl", gives="mean", **whole),
        from_fields("hidden", "hidden_p", "head_p", "hidden_q", "head_q", sees="hidden"),
        Convention(
            name="heads",
            summary="f(hidden_p, Head(head_p), hidden_q, Head(head_q)) -> [sequences, steps]",
            call=of_head_records,
            sees="hidden",
        ),
    ]


CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {convention.name: convention for convention in [*_sampled(), *_whole()]}
)
"""Name -> record. ``p`` is the policy, ``q`` the reference; ``dataclasses.replace`` makes the neighbours."""


def convention_called(convention: "str | Convention") -> Convention:
    """The record itself, or the one of the table that has this name.

    Raises:
        UnknownNameError: if there is none.
    """
    if isinstance(convention, Convention):
        return convention
    return look_up(CONVENTIONS, convention, "convention")
