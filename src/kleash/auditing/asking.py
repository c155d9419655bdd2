"""From what was asked for to what is audited: a package known by name, one of its cases, or a dotted path."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from kleash.auditing.conventions import CONVENTIONS, convention_called
from kleash.auditing.running import audit, blank_audit
from kleash.auditing.targets.case import Case
from kleash.auditing.targets.dotted import (
    arguments_of,
    function_at,
)
from kleash.auditing.targets.peers import TARGETS
from kleash.auditing.verdict import with_remedies
from kleash.errors import CannotRunError, OptionError, ShapeError, UnknownNameError
from kleash.records import Audit, Finding
from kleash.version import __version__

USUAL: Mapping[str, str] = MappingProxyType(
    {
        "loss": "f(token_logp, token_logq), log-probabilities of sampled tokens, one value a token, differentiated",
        "reward": "the same, detached and subtracted from a reward",
        "metric": "the same, only logged",
        "mean_loss_with_mask": "f(token_logp, token_logq, mask), one mean over the mask, differentiated",
        "loss_with_behaviour": "f(token_logp, token_logq, behaviour_logp), with importance weights",
        "log_probabilities": "f(logp, logq) of whole distributions, the vocabulary on the last axis",
        "logits": "f(logits_p, logits_q)",
        "distillation": "f(student_logits, teacher_logits), KL(teacher || student)",
        "kl_div": "f(logq, p), the order of torch's F.kl_div",
    }
)
"""Convention -> the call and what its result is taken for, in a few words; p is the policy, q the reference."""


def cases_of(target: str, convention: str | None = None, words: Sequence[str] = ()) -> tuple[Case, ...]:
    """What there is to audit.

    Args:
        target: a key of ``TARGETS`` for all that is known of that package, ``"verl:low_var_kl"`` for one case of it, or
            ``"package.module:function"``.
        convention: how a function at a dotted path is called; the known packages bring their own.
        words: keyword arguments as typed, ``"kl_penalty=k3"``.

    Raises:
        OptionError: if a dotted path comes without a convention, or a known package with one, or a word means nothing.
        UnknownNameError: if there is no such target, case, convention, module or function.
        MissingExtraError: if the package is not installed; it gives the line that installs it.
        CannotRunError: if importing it raises.
    """
    package, colon, name = target.partition(":")
    if package in TARGETS and (not colon or name in {case.name for case in TARGETS[package].cases}):
        return _known(package, name, convention, words)
    if not colon and "." not in package:
        raise UnknownNameError(
            f"no target is called {target!r}; there are {', '.join(TARGETS)}, or write package.module:function"
        )
    return (_at_path(target, convention, words),)


def audits_of(cases: Sequence[Case]) -> Iterator[Audit]:
    """The audit of each case, with what is to be said about how it was run.

    A case of a known package that cannot be called is a finding; a function at a dotted path that cannot be called
    as was said is an error.

    Raises:
        CannotRunError, ShapeError: if the only case cannot be called by its convention.
    """
    for case in cases:
        try:
            found = audit(case.function, case.convention, name=case.name, arguments=case.arguments)
        except (CannotRunError, ShapeError) as error:
            if len(cases) == 1:
                raise
            found = _unanswered(case, str(error))
        found = replace(found, findings=with_remedies([_softened(f, case) for f in found.findings]))
        yield replace(found, notes=(*case.notes, *found.notes), versions={**found.versions, **case.versions})


def _softened(finding: Finding, case: Case) -> Finding:
    """What the case's own trainer never meets is fragile."""
    met = finding.severity != "wrong" or finding.kind not in case.fragile
    return finding if met else replace(finding, severity="fragile")


def _unanswered(case: Case, sentence: str) -> Audit:
    """The audit of a function that gives no number."""
    finding = Finding(kind="cannot_be_called", severity="wrong", sentence=sentence)
    return blank_audit(
        case.convention,
        case.name,
        case.arguments,
        verdict=(sentence,),
        findings=with_remedies([finding]),
        versions={"kleash": __version__, "torch": torch.__version__},
    )


def _known(package: str, name: str, convention: str | None, words: Sequence[str]) -> tuple[Case, ...]:
    if convention is not None or words:
        raise OptionError(
            f"{package} brings its own conventions and arguments; name the function as package.module:function "
            "to choose them"
        )
    cases = TARGETS[package].load()
    chosen = [case for case in cases if not name or case.name == name]
    return tuple(replace(case, name=f"{package}:{case.name}") for case in chosen)


def _at_path(target: str, convention: str | None, words: Sequence[str]) -> Case:
    function = function_at(target)
    if convention is None:
        names = (*USUAL, *(name for name in CONVENTIONS if name not in USUAL))
        usual = "; ".join(f"{name} is {meaning}" for name, meaning in USUAL.items())
        raise OptionError(f"how is {target} called? give --convention, one of {', '.join(names)}. {usual}")
    package = target.partition(".")[0].partition(":")[0]
    return Case(
        name=target,
        function=function,
        convention=convention_called(convention),
        arguments=arguments_of(function, words),
        packages=(package,),
    )
