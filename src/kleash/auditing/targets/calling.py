"""How the functions of the known packages are called, and the notes that several of them need."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from kleash.auditing.conventions import CONVENTIONS, Convention, from_fields
from kleash.auditing.targets.case import Case
from kleash.auditing.targets.dotted import Function

HIDDEN = ("hidden_p", "head_p", "hidden_q", "head_q")

MINUS_REWARD = replace(CONVENTIONS["reward_with_mask"], name="minus_reward_with_mask", sign=-1)
"""A penalty as it is added to the scores: minus the KL."""
MINUS_SEQUENCE_REWARD = replace(CONVENTIONS["sequence_reward"], name="minus_sequence_reward", sign=-1)
MEAN_OF_HIDDEN = from_fields("mean_hidden", *HIDDEN, gives="mean", sees="hidden")
SAMPLED_FROM_LOGITS = from_fields("sampled_from_logits", "logits_p", "logits_q", "tokens")

STUDENT = "the student is p, the teacher q"
TOP_2 = "k = 2, so that something is left out of a small vocabulary"


def claiming(convention: str | Convention, claims: str) -> Convention:
    """A convention for a function that is meant to be another divergence."""
    record = CONVENTIONS[convention] if isinstance(convention, str) else convention
    return replace(record, name=f"{record.name}, {claims}", claims=claims)


def case(
    name: str,
    function: Function,
    convention: str | Convention,
    audits: str,
    *notes: str,
    fragile: Collection[str] = (),
    **arguments: Any,
) -> Case:
    """A case, its convention by name; ``fragile``: kinds of findings that its own trainer never meets."""
    record = CONVENTIONS[convention] if isinstance(convention, str) else convention
    return Case(
        name=name,
        function=function,
        convention=record,
        audits=audits,
        notes=notes,
        fragile=fragile,
        arguments=arguments,
    )
