"""Conventions: how a KL function is called and what its result means, one record each."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kleash.auditing.toy_distributions import AuditInputs
from kleash.divergences import DIVERGENCES, find_divergence
from kleash.errors import OptionError
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
        UnknownNameError, OptionError: if ``claims`` is no divergence.
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
    """The kind of its arguments: log-probabilities of sampled tokens, whole distributions, or hidden states. A function
    of the latter whose result changes with the tokens reads them there, and is audited as one of tokens."""
    sign: Sign = 1
    """-1 if it is meant to return minus the divergence."""
    takes_behaviour: bool = False
    """Whether it receives the behaviour log-probabilities, without which it cannot be right off-policy."""
    takes_mask: bool = False
    claims: str = "kl"
    """The divergence that it should compute: a key of ``DIVERGENCES``, or a key of ``FAMILIES`` with its parameter,
    ``jensen_shannon:0.1``; p is the policy, q the reference."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for field, values in {"place": Place, "gives": Gives, "sees": Sees, "sign": Sign}.items():
            require_choice(get_args(values), **{field: getattr(self, field)})
        find_divergence(self.claims)


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
        "hidden": frozenset(("hidden_p", "hidden_q")),
        "distributions": frozenset(("logp", "logq", "probs_p", "probs_q", "logits_p", "logits_q")),
    }
)
"""What a function sees -> the fields of ``AuditInputs`` of which it then takes one; the first that applies."""


def from_fields(name: str, *names: str, **options: Any) -> Convention:
    """The convention of a function that takes these fields of ``AuditInputs``, in this order.

    Without ``sees``, one that takes whole distributions or hidden states sees them.
    """
    return _of_expression(name, f"f({', '.join(names)})", **options)


def packed(name: str, *names: str, **options: Any) -> Convention:
    """The convention of a function on one axis: these fields, the tokens of all responses concatenated."""
    flat = ", ".join(f"{field}.flatten()" for field in names)
    return replace(
        _of_expression(name, f"f({flat}).view_as(tokens)", **options),
        summary=f"f({', '.join(names)}) -> [tokens], all responses concatenated",
    )


def from_call(line: str) -> Convention:
    """The convention that a line describes: ``f(logits_p, teacher=logits_q, labels=labels)[0] -> mean reverse_kl``.

    Before the arrow stands a Python expression of ``f``, the fields of ``AuditInputs``, ``Head``, ``torch``,
    ``SimpleNamespace`` and ``F``, which is ``torch.nn.functional``; it is evaluated in each call. After it stand, in
    any order, values of ``place``, ``gives`` and ``sees``, a divergence as in ``claims``, and ``minus`` for a sign of
    -1.

    Raises:
        OptionError: if the expression is not one of Python.
        UnknownNameError: if a word after the arrow has no meaning.
    """
    expression, _, words = line.partition("->")
    try:
        options = dict(
            ("claims", word) if ":" in word else look_up(WORDS, word, "word after ->")
            for word in words.split()
        )
        return _of_expression(line, expression.strip(), **options)
    except SyntaxError as error:
        raise OptionError(
            f"the call of the convention {line!r} is no Python expression: {error.msg}"
        ) from error


def _of_expression(name: str, expression: str, **options: Any) -> Convention:
    """The convention whose call is a Python expression, as ``from_call`` has it."""
    code = compile(expression, "<convention>", "eval")
    used = {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}
    options.setdefault("sees", next((key for key, of in SEEN_FIELDS.items() if of & used), "tokens"))
    return Convention(
        name=name,
        summary=f"{expression} -> {SHAPES[options.get('gives', 'token')]}",
        call=lambda function, inputs: eval(code, {**EXPRESSION_NAMES, **vars(inputs), "f": function}),
        takes_behaviour="behaviour_logp" in used,
        takes_mask=not used.isdisjoint(("mask", "labels")),
        **options,
    )


def find_convention(convention: str | Convention) -> Convention:
    """The convention of this name of ``CONVENTIONS``, or that a line with a call describes, or the record itself."""
    if isinstance(convention, str) and "(" in convention:
        return from_call(convention)
    return look_up(CONVENTIONS, convention, "convention")


EXPRESSION_NAMES: Mapping[str, Any] = MappingProxyType(
    {"torch": torch, "F": torch.nn.functional, "Head": Head, "SimpleNamespace": SimpleNamespace}
)
"""What the call of a convention may use beside the function and the fields of ``AuditInputs``."""
WORDS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        **{
            word: (field, word)
            for field, words in {
                "place": get_args(Place),
                "gives": get_args(Gives),
                "sees": get_args(Sees),
                "claims": DIVERGENCES,
            }.items()
            for word in words
        },
        "minus": ("sign", -1),
    }
)
"""Word after the arrow of a call -> the field of ``Convention`` and its value."""
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
    from_fields(
        "mean_distillation_with_labels", "logits_p", "logits_q", "labels", claims="reverse_kl", gives="mean"
    ),
    from_fields("hidden", "hidden_p", "head_p", "hidden_q", "head_q"),
    _of_expression("heads", "f(hidden_p, Head(head_p), hidden_q, Head(head_q))"),
)
CONVENTIONS: Mapping[str, Convention] = MappingProxyType({record.name: record for record in _CONVENTIONS})
"""Name -> record. ``p`` is the policy, ``q`` the reference; ``dataclasses.replace`` makes variants."""
