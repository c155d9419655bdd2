"""Purity: whether the result depends on the arguments alone, and the call changes nothing else."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.padding import padded_inputs
from kleash.auditing.inputs import AuditInputs, make_inputs
from kleash.auditing.toy_distributions import VOCAB_SIZE, toy_distributions
from kleash.errors import KleashError
from kleash.store.audit import CallRow, Finding

CALLS = 33
"""Repeated calls with the same numbers under the same seed."""
FINAL_CALLS = 70
"""Repeated calls at the end of the audit, after several hundred others."""
SEED = 20
PADDING_FILLS = ("other numbers", "p 200 nats below q", "q is -inf", "NaN")
"""The padding of the calls whose arguments are compared before and after."""

REPEATED = "the same numbers again"
OTHER_INPUTS = "other numbers of the same shape before"
REUSED_TENSORS = "new numbers in the same tensors"
FINAL = "the same numbers at the end of the audit"
ARGUMENTS = "the arguments after the call"
SETTINGS = "the settings of the process after the call"
RANDOM = {
    "process_seed": "its result is random and depends on the seed of the process",
    "own_generator": "its result is random, from a separate generator",
}
"""Defect of a random function -> the problem."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Purity:
    """The checks of repeated calls, and the result of the first one."""

    rows: tuple[CallRow, ...]
    first: Tensor

    @property
    def is_random(self) -> bool:
        """Whether results differ from call to call without any order."""
        return any(row.defect in RANDOM for row in self.rows)

    @property
    def has_state(self) -> bool:
        """Whether earlier calls change the result of later ones."""
        return bool(_stateful(self.rows))


def _stateful(rows: Sequence[CallRow]) -> list[CallRow]:
    """The checks in which earlier calls changed the result of later ones."""
    return [row for row in rows if row.defect not in ("", "overwritten", *RANDOM)]


def purity_findings(rows: Sequence[CallRow]) -> list[Finding]:
    """State, randomness, and overwritten arguments or settings."""
    findings: list[Finding] = []
    for row in rows:
        if row.defect == "overwritten":
            is_input = row.case == ARGUMENTS
            kind = "changes_inputs" if is_input else "changes_settings"
            sentence = (
                f"It is not pure: {row.problem}{', which the caller may use again' if is_input else ''}."
            )
            findings.append(Finding(kind=kind, severity="wrong", sentence=sentence))
        elif row.defect in RANDOM:
            sentence = (
                f"It is not pure: {row.problem}. Its values and gradients are means over many calls, and precision and "
                "padding were not tried."
            )
            findings.append(Finding(kind="random", severity="note", sentence=sentence))
    if stateful := _stateful(rows):
        details = "; ".join(f"{row.case}: {row.problem}" for row in stateful)
        sentence = f"It is not pure: its result depends on earlier calls ({details})."
        where = ", ".join(row.case for row in stateful)
        findings.append(Finding(kind="stateful", severity="wrong", sentence=sentence, where=where))
    return findings


def check_purity(audited: AuditedFunction) -> Purity:
    """Call the function repeatedly, with other inputs in between and with tensors that are used again.

    Raises:
        CannotRunError, ShapeError: if the first call fails.
    """
    settings = {name: read() for name, (read, _) in PROCESS_SETTINGS.items()}
    first = _result(audited, _inputs(audited, "far"))
    rows = [_checked(REPEATED, _repeated_calls, audited, first)]
    if not rows[0].problem:
        rows.append(_checked(OTHER_INPUTS, _other_inputs, audited, first))
        rows.append(_checked(REUSED_TENSORS, _reused_tensors, audited, first))
    rows += [_overwritten_arguments(audited), _overwritten_settings(audited, settings)]
    return Purity(rows=tuple(rows), first=first)


def check_final_call(audited: AuditedFunction, purity: Purity) -> CallRow:
    """Repeat the first call at the end of the audit, unless impurity was found before."""
    if purity.is_random or purity.has_state:
        return CallRow(case=FINAL, problem="")
    return _checked(FINAL, _after_many_calls, audited, purity.first)


Problem = tuple[str, str]
"""How a call was impure, in words and as a code; two empty strings if it was pure."""
Check = Callable[[AuditedFunction, Tensor], Problem]
"""Calls the function again and compares with the result of its first call."""


def _checked(case: str, check: Check, audited: AuditedFunction, first: Tensor) -> CallRow:
    """The row of a check, or of the error of a call."""
    try:
        problem, defect = check(audited, first)
    except KleashError as error:
        problem, defect = f"a later call fails: {error}", "error"
    return CallRow(case=case, problem=problem, defect=defect)


def _inputs(audited: AuditedFunction, toy_name: str) -> AuditInputs:
    """Every token of the vocabulary as a response; only one response for a function that returns a mean."""
    toy = toy_distributions()[toy_name]
    inputs = toy.inputs(toy.logits_p.clone().requires_grad_(), "on-policy")
    return inputs.select(slice(2, 3)) if audited.convention.gives == "mean" else inputs


def _result(audited: AuditedFunction, inputs: AuditInputs, seed: int = SEED) -> Tensor:
    """Value and gradient of one call in one flat tensor."""
    seed_generators(seed)
    result = audited.call(inputs)
    leaves = [x for x in (inputs.token_logp, inputs.logp, inputs.logits_p) if x.requires_grad]
    parts = [result.detach(), *audited.gradients(result.sum(), leaves)]
    return torch.cat([part.double().flatten() for part in parts if part is not None])


def _is_same(result: Tensor, other: Tensor) -> bool:
    """Whether two results agree up to rounding."""
    return result.shape == other.shape and torch.allclose(result, other, rtol=1e-6, atol=1e-9, equal_nan=True)


def _compared(before: Tensor, after: Tensor) -> Problem:
    """The difference of two results that should be the same, at the entry that changed most."""
    if before.shape != after.shape:
        return "the result has another shape: a gradient appears or disappears", "changed_shape"
    if _is_same(before, after):
        return "", ""
    entry = int((after - before).abs().nan_to_num(nan=torch.inf).argmax())
    return f"the result is {after[entry].item():.6g}, and was {before[entry].item():.6g}", "changed"


def _repeated_calls(audited: AuditedFunction, first: Tensor) -> Problem:
    """The same call repeated with the same seed, and if nothing changes with others."""
    inputs = _inputs(audited, "far")
    results = [first, *(_result(audited, inputs) for _ in range(CALLS))]
    different = next((result for result in results if not _is_same(first, result)), None)
    if different is None:
        by_seed = (_result(audited, inputs, SEED + offset) for offset in range(1, 5))
        defect = "" if all(_is_same(first, result) for result in by_seed) else "process_seed"
        return RANDOM.get(defect, ""), defect
    if _is_unordered(results) or _is_unordered([_result(audited, inputs) for _ in range(CALLS)]):
        return RANDOM["own_generator"], "own_generator"
    return _compared(first, different)


def _is_unordered(results: Sequence[Tensor]) -> bool:
    """Whether successive results look random: not monotonic, not periodic, not autocorrelated.

    About one random series in 400 is autocorrelated by chance; state shows in a second series as well.
    """
    if any(result.shape != results[0].shape for result in results):
        return False
    weights = torch.linspace(0.5, 1.5, len(results[0]), dtype=torch.float64)
    series = torch.stack(list(results)).nan_to_num() @ weights
    steps, rounding = series.diff(), 1e-9 * series.abs().max()
    is_monotonic = bool((steps >= -rounding).all()) or bool((steps <= rounding).all())
    periods = range(1, len(series) // 2)
    is_periodic = any(torch.allclose(series[:-n], series[n:], rtol=1e-9) for n in periods)
    deviations = series - series.mean()
    autocorrelation = (deviations[1:] * deviations[:-1]).sum() / deviations.square().sum()
    return not is_monotonic and not is_periodic and bool(autocorrelation.abs() < 0.5)


def _other_inputs(audited: AuditedFunction, first: Tensor) -> Problem:
    """The first call after a call with other numbers."""
    audited.call(_inputs(audited, "peaked"))
    return _compared(first, _result(audited, _inputs(audited, "far")))


def _reused_tensors(audited: AuditedFunction, first: Tensor) -> Problem:
    """A call with new numbers in the tensors of an earlier call, compared with calls of two other batch sizes.

    No call before had a batch of this size, so that a function that remembers its arguments by shape or address finds
    nothing else. If the size itself changes the result, nothing is compared.
    """
    before, between = (_mean(audited, _repeated_token("peaked", size)) for size in (5, 7))
    reused, new = _repeated_token("far", 6), _repeated_token("peaked", 6)
    with suppress(KleashError):  # overwritten arguments have their own check
        _mean(audited, reused)
        with torch.no_grad():
            for field in fields(AuditInputs):
                getattr(reused, field.name).copy_(getattr(new, field.name))
        after = _mean(audited, reused)
        return _compared(before, after if _is_same(before, between) else before)
    return "", ""


def _repeated_token(toy_name: str, size: int) -> AuditInputs:
    """One token as a batch of responses."""
    toy = toy_distributions()[toy_name]
    p, q = (x.expand(size, VOCAB_SIZE).unsqueeze(1) for x in (toy.logits_p, toy.logits_q))
    return make_inputs(p.clone().requires_grad_(), q, torch.full((size, 1), 3)).clone()


def _mean(audited: AuditedFunction, inputs: AuditInputs) -> Tensor:
    """The mean of the values of a call under the audit's seed, which may overwrite ``inputs``."""
    seed_generators(SEED)
    return audited.call_in_place(inputs).detach().double().mean().reshape(1)


def _after_many_calls(audited: AuditedFunction, first: Tensor) -> Problem:
    """The first call after many others."""
    inputs = _inputs(audited, "far")
    for _ in range(FINAL_CALLS):
        audited.call(inputs)
    return _compared(first, _result(audited, inputs))


def _overwritten(case: str, verb: str, names: Sequence[str]) -> CallRow:
    """The row of a check for overwritten arguments or settings."""
    problem = f"it {verb} {', '.join(dict.fromkeys(names))}" if names else ""
    return CallRow(case=case, problem=problem, defect="overwritten" if names else "")


def _overwritten_arguments(audited: AuditedFunction) -> CallRow:
    """The check for arguments that the function overwrites."""
    names: list[str] = []
    padded = [padded_inputs(fill) for fill in PADDING_FILLS]
    for inputs in (_inputs(audited, "far"), *padded, padded[0].to(torch.bfloat16)):
        arguments = inputs.clone()
        with suppress(KleashError):
            audited.call_in_place(arguments)
        for field in fields(AuditInputs):
            before, after = (getattr(tensors, field.name).detach() for tensors in (inputs, arguments))
            if after.shape != before.shape or bool(
                ((before != after) & ~(before.isnan() & after.isnan())).any()
            ):
                names.append(field.name)
    return _overwritten(ARGUMENTS, "overwrites", names)


PROCESS_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = MappingProxyType(
    {
        "whether gradients are computed": (torch.is_grad_enabled, torch.set_grad_enabled),
        "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "the number of threads": (torch.get_num_threads, torch.set_num_threads),
        "whether algorithms are deterministic": (
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
    }
)
"""Name in a sentence -> the functions that read and write a setting of torch."""
GENERATORS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = MappingProxyType(
    {
        "torch's": (
            lambda: torch.get_rng_state().tolist(),
            lambda state: torch.set_rng_state(torch.tensor(state, dtype=torch.uint8)),
        ),
        "Python's": (random.getstate, random.setstate),
        "numpy's": (np.random.get_state, np.random.set_state),
    }
)
"""Whose -> the functions that read and write the state of a random generator."""


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, Python and numpy."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for every kind of device
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def _overwritten_settings(audited: AuditedFunction, settings: Mapping[str, Any]) -> CallRow:
    """The check for settings of the process that the function changes, including the seeds of its generators.

    A generator that is in the same state after calls under two different seeds was seeded by the function.
    """
    states: list[dict[str, str]] = []
    for seed in (SEED, SEED + 1):
        seed_generators(seed)
        with suppress(KleashError):
            audited.call_in_place(_inputs(audited, "far").clone())
        states.append({name: repr(read()) for name, (read, _) in GENERATORS.items()})
    names = [name for name, (read, _) in PROCESS_SETTINGS.items() if read() != settings[name]]
    names += [f"the seed of {name} generator" for name in GENERATORS if states[0][name] == states[1][name]]
    torch.set_grad_enabled(True)
    return _overwritten(SETTINGS, "changes", names)


@contextmanager
def restored_process_settings() -> Iterator[None]:
    """Restore the process's random generators and torch settings on exit."""
    states = [(write, read()) for read, write in GENERATORS.values()]
    settings = [(read, write, read()) for read, write in PROCESS_SETTINGS.values()]
    try:
        with torch.enable_grad():
            seed_generators(SEED)
            yield
    finally:
        for write, state in states:
            write(state)
        for read, write, setting in settings:
            if read() != setting:
                write(setting)
