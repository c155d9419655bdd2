"""Conventions: how a KL function is called and what its result means, one record each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import Tensor

from kleash.auditing.toy_distributions import AuditInputs
from kleash.divergences import DIVERGENCES
from kleash.linear import Head
from kleash.registry import look_up, require_choice

Call = Callable[[Callable[..., Any], AuditInputs], Tensor]
Place = Literal["loss", "reward", "metric"]
Gives = Literal["vocabulary", "token", "sequence", "mean"]
Sees = Literal["tokens", "distributions", "hidden"]
Sign = Literal[1, -1]


@dataclass(frozen=True, kw_only=True)
class Convention:
    """How a function is called, and what its result is meant to be.

    Raises:
        OptionError: if ``place``, ``gives``, ``sees`` or ``sign`` has an unknown value.
        UnknownNameError: if ``claims`` is not a key of ``DIVERGENCES``.
    """

    name: str
    summary: str
    """The call in a line: ``f(token_logp, token_logq) -> [sequences, steps]``."""
    call: Call
    """``call(function, inputs)``: calls ``function`` with fields of ``AuditInputs`` and returns its tensor."""
    place: Place = "loss"
    """"loss": the result is differentiated. "reward": it is detached and multiplies ``grad log p`` of the token
    and of the earlier ones. "metric": only its value matters."""
    gives: Gives = "token"
    """"vocabulary" [sequences, steps, vocab], to be summed over the last axis; "token" [sequences, steps];
    "sequence" [sequences], the sum of each response; "mean", one number, the mean over the mask."""
    sees: Sees = "tokens"
    """The kind of its arguments: log-probabilities of sampled tokens, whole distributions, or hidden states."""
    sign: Sign = 1
    """-1 if it is meant to return minus the divergence."""
    takes_behaviour: bool = False
    """Whether it receives the behaviour log-probabilities, without which it cannot be right off-policy."""
    takes_mask: bool = False
    claims: str = "kl"
    """The divergence that it should compute: a key of ``DIVERGENCES``; p is the policy, q the reference."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for field, values in {"place": Place, "gives": Gives, "sees": Sees, "sign": Sign}.items():
            require_choice(get_args(values), **{field: getattr(self, field)})
        look_up(DIVERGENCES, self.claims, "divergence")


SHAPES: Mapping[str, str] = MappingProxyType(
    {
        "vocabulary": "[sequences, steps, vocab], summed over the last axis",
        "token": "[sequences, steps]",
        "sequence": "[sequences]",
        "mean": "mean over the mask",
    }
)


SEEN_FIELDS: Mapping[Sees, frozenset[str]] = MappingProxyType(
    {
        "tokens": frozenset(("tokens",)),
        "hidden": frozenset(("hidden_p", "hidden_q")),
        "distributions": frozenset(("logp", "logq", "probs_p", "probs_q", "logits_p", "logits_q")),
    }
)
"""What a function sees -> the fields of ``AuditInputs`` of which it then takes one; the first that applies."""


def from_fields(name: str, *names: str, **options: Any) -> Convention:
    """The convention of a function that takes these fields of ``AuditInputs``, in this order.

    Without ``sees``, one that takes whole distributions or hidden states sees them, except with ``tokens``, at which
    they are then read.
    """
    options.setdefault("sees", next((key for key, of in SEEN_FIELDS.items() if of & {*names}), "tokens"))
    return Convention(
        name=name,
        summary=f"f({', '.join(names)}) -> {SHAPES[options.get('gives', 'token')]}",
        call=lambda function, inputs: function(*(getattr(inputs, field) for field in names)),
        takes_behaviour="behaviour_logp" in names,
        takes_mask="mask" in names,
        **options,
    )


def packed(name: str, *names: str, **options: Any) -> Convention:
    """The convention of a function on one axis: these fields, the tokens of all responses concatenated."""

    def call(function: Callable[..., Any], inputs: AuditInputs) -> Any:
        result = function(*(getattr(inputs, field).flatten(0, 1) for field in names))
        if isinstance(result, Tensor) and result.shape == (inputs.tokens.numel(),):
            return result.reshape(inputs.tokens.shape)
        return result

    return replace(
        from_fields(name, *names, **options),
        summary=f"f({', '.join(names)}) -> [tokens], all responses concatenated",
        call=call,
    )


TOKEN_FIELDS = ("token_logp", "token_logq")


_CONVENTIONS = (
    from_fields("loss", *TOKEN_FIELDS),
    from_fields("loss_with_mask", *TOKEN_FIELDS, "mask"),
    from_fields("loss_with_behaviour", *TOKEN_FIELDS, "behaviour_logp"),
    from_fields("loss_with_behaviour_and_mask", *TOKEN_FIELDS, "behaviour_logp", "mask"),
    from_fields("sequence_loss", *TOKEN_FIELDS, gives="sequence"),
    from_fields("sequence_loss_with_mask", *TOKEN_FIELDS, "mask", gives="sequence"),
    from_fields("sequence_loss_with_behaviour", *TOKEN_FIELDS, "behaviour_logp", gives="sequence"),
    from_fields("mean_loss", *TOKEN_FIELDS, gives="mean"),
    from_fields("mean_loss_with_mask", *TOKEN_FIELDS, "mask", gives="mean"),
    from_fields("mean_loss_with_behaviour", *TOKEN_FIELDS, "behaviour_logp", gives="mean"),
    from_fields("mean_loss_with_behaviour_and_mask", *TOKEN_FIELDS, "behaviour_logp", "mask", gives="mean"),
    from_fields("reward", *TOKEN_FIELDS, place="reward"),
    from_fields("reward_with_mask", *TOKEN_FIELDS, "mask", place="reward"),
    from_fields("sequence_reward", *TOKEN_FIELDS, place="reward", gives="sequence"),
    from_fields("metric", *TOKEN_FIELDS, place="metric"),
    packed("packed_loss", *TOKEN_FIELDS),
    packed("packed_loss_with_mask", *TOKEN_FIELDS, "mask"),
    packed("packed_reward", *TOKEN_FIELDS, place="reward"),
    packed("packed_metric", *TOKEN_FIELDS, place="metric"),
    from_fields("mean_metric_with_mask", *TOKEN_FIELDS, "mask", place="metric", gives="mean"),
    from_fields("log_probabilities", "logp", "logq"),
    from_fields("mean_log_probabilities", "logp", "logq", gives="mean"),
    from_fields("log_probabilities_with_mask", "logp", "logq", "mask"),
    from_fields("probabilities", "probs_p", "probs_q"),
    from_fields("kl_div", "logq", "probs_p", gives="vocabulary"),
    from_fields("kl_div_log_target", "logq", "logp", gives="vocabulary"),
    from_fields("logits", "logits_p", "logits_q"),
    from_fields("logits_with_mask", "logits_p", "logits_q", "mask"),
    from_fields("mean_logits", "logits_p", "logits_q", gives="mean"),
    from_fields("mean_logits_with_mask", "logits_p", "logits_q", "mask", gives="mean"),
    from_fields("distillation", "logits_p", "logits_q", claims="reverse_kl"),
    from_fields("mean_distillation", "logits_p", "logits_q", claims="reverse_kl", gives="mean"),
    from_fields("hidden", "hidden_p", "head_p", "hidden_q", "head_q"),
    Convention(
        name="heads",
        summary="f(hidden_p, Head(head_p), hidden_q, Head(head_q)) -> [sequences, steps]",
        call=lambda function, inputs: function(
            inputs.hidden_p, Head(inputs.head_p), inputs.hidden_q, Head(inputs.head_q)
        ),
        sees="hidden",
    ),
)
CONVENTIONS: Mapping[str, Convention] = MappingProxyType({record.name: record for record in _CONVENTIONS})
"""Name -> record. ``p`` is the policy, ``q`` the reference; ``dataclasses.replace`` makes variants."""
