"""Whether the function is one: a result that depends on the arguments alone, and changes nothing but itself."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kleash.auditing.masks import padded
from kleash.auditing.situations import Situation, make_situation
from kleash.auditing.subject import Subject
from kleash.auditing.worlds import VOCAB, World, worlds
from kleash.errors import KleashError
from kleash.records.audit import CallRow

CALLS = 8
"""How often the same numbers are handed over one after the other, to begin with: value and gradient."""
VALUES = 24
"""And the value alone."""
MORE_CALLS = 70
"""And at the end of the audit: some hundreds of calls in all."""
SEED = 20

PADDINGS = ((-3.0, -0.5), (-200.0, 0.0), (0.0, -torch.inf), (torch.nan, torch.nan))
"""What stands in the padding of p's and of q's tensors while arguments are watched."""

AGAIN = "the same numbers again"
RANDOM = "it is random"
"""How the problem of a random function begins."""
REFILLED = "new numbers in the same tensors"
OTHERS = "other numbers of the same shape before"
LATER = "the same numbers at the end of the audit"
INPUTS = "the arguments after the call"
SETTINGS = "the settings of the process after the call"


@dataclass(frozen=True, kw_only=True, eq=False)
class Purity:
    """What repeated calls showed."""

    rows: tuple[CallRow, ...]
    first: Tensor
    """The result of the first call, to be compared with one at the end of the audit."""

    @property
    def is_random(self) -> bool:
        """Whether results scatter from call to call without any order."""
        return any(row.problem.startswith(RANDOM) for row in self.rows)

    @property
    def has_state(self) -> bool:
        """Whether earlier calls change later ones."""
        return any(
            row.problem and not row.problem.startswith(RANDOM) and row.case not in (INPUTS, SETTINGS)
            for row in self.rows
        )


@contextmanager
def process_settings_kept() -> Iterator[None]:
    """Give the process's generators and settings back as they were."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - the process's own generator is meant
    dtype, threads, deterministic = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
    try:
        with torch.enable_grad():
            seed(SEED)
            yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def seed(number: int) -> None:
    """Begin the random numbers of torch, Python and numpy anew."""
    torch.default_generator.manual_seed(number)  # torch.manual_seed looks for every kind of device
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def purity(subject: Subject) -> Purity:
    """Call the function repeatedly, in other orders and with tensors that are used again.

    Raises:
        CannotRunError, ShapeError: if it cannot be called at all.
    """
    before = _settings()
    seed(SEED)
    first = _outcome(subject, _one_token(subject, worlds()["far"]))
    rows = [CallRow(case=AGAIN, problem=_without_error(_repeated, subject, first))]
    if not rows[0].problem:
        rows.append(CallRow(case=OTHERS, problem=_without_error(_order, subject, first)))
        rows.append(CallRow(case=REFILLED, problem=_without_error(_refilled, subject)))
    rows.append(CallRow(case=INPUTS, problem=_changed_inputs(subject)))
    rows.append(CallRow(case=SETTINGS, problem=_changed_settings(subject, before)))
    return Purity(rows=tuple(rows), first=first)


def later_call(subject: Subject, before: Purity) -> CallRow:
    """The first call once more, after all others."""
    if before.is_random or before.has_state:
        return CallRow(case=LATER, problem="")
    given = _one_token(subject, worlds()["far"])
    try:
        for _ in range(MORE_CALLS):
            subject.raw(given)
        seed(SEED)
        found = _outcome(subject, given)
    except KleashError as error:
        return CallRow(case=LATER, problem=f"the call fails now: {error}")
    problem = "" if _same(found, before.first) else f"the result is now {_change(before.first, found)}"
    return CallRow(case=LATER, problem=problem)


def _one_token(subject: Subject, world: World) -> Situation:
    """Every token of the world's vocabulary, as a response each; of a mean only one, as everywhere."""
    given = world.situation(world.logits_p.clone().requires_grad_(), "on-policy")
    return given.only(slice(2, 3)) if subject.convention.gives == "mean" else given


def _outcome(subject: Subject, situation: Situation) -> Tensor:
    """Value and gradient of one call in a row of numbers."""
    found = subject.raw(situation)
    numbers = [found.detach().double().flatten()]
    if subject.differentiated and found.requires_grad:
        leaves = [x for x in (situation.token_logp, situation.logp, situation.logits_p) if x.requires_grad]
        numbers += [
            g.double().flatten() for g in subject.gradients(found.sum(), leaves, again=True) if g is not None
        ]
    return torch.cat(numbers)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True)


def _change(before: Tensor, after: Tensor) -> str:
    """By how much the result changed, in words."""
    if before.shape != after.shape:
        return "of another shape: a gradient comes or goes"
    at = int((after - before).abs().nan_to_num(nan=torch.inf).argmax())
    return f"{after[at].item():.6g}, and was {before[at].item():.6g}"


def _repeated(subject: Subject, first: Tensor) -> str:
    """What happens where the same numbers come again, under the same seed and then under others."""
    given = _one_token(subject, worlds()["far"])
    found = [first]
    for _ in range(CALLS):
        seed(SEED)
        try:
            found.append(_outcome(subject, given))
        except KleashError as error:
            return f"the second call fails: {error}"
    seed(SEED)
    value = subject.raw(given).detach().double().flatten()
    values = [value]
    for _ in range(VALUES):
        seed(SEED)
        values.append(subject.raw(given).detach().double().flatten())
    if not all(_same(value, one) for one in values):
        found = values
    first = found[0]
    if all(_same(first, one) for one in found):
        for number in range(4):
            seed(SEED + 1 + number)
            if not _same(found[-1], _outcome(subject, given)):
                return f"{RANDOM}: results depend on the seed of the process"
        return ""
    other = next(one for one in found if not _same(first, one))
    if any(one.shape != first.shape for one in found):
        return f"the result is {_change(first, other)}"
    weights = torch.linspace(0.5, 1.5, len(first), dtype=torch.float64)
    if _scatters(torch.stack(found).nan_to_num() @ weights):
        return f"{RANDOM}, by a generator of its own"
    return f"the result is {_change(first, other)}"


def _scatters(series: Tensor) -> bool:
    """Whether numbers follow each other without any order: not sorted, no period, no memory of the last one."""
    steps, rounding = series.diff(), 1e-9 * series.abs().max()
    if bool((steps >= -rounding).all()) or bool((steps <= rounding).all()):
        return False
    if any(torch.allclose(series[:-n], series[n:], rtol=1e-9) for n in range(1, len(series) // 2)):
        return False
    apart = series - series.mean()
    memory = (apart[1:] * apart[:-1]).sum() / apart.square().sum()
    return bool(memory.abs() < 0.5)


def _without_error(probe: Callable[..., str], *given: Any) -> str:
    """What the probe says, or how a later call fails where the first did not."""
    try:
        return probe(*given)
    except KleashError as error:
        return f"a later call fails: {error}"


def _order(subject: Subject, first: Tensor) -> str:
    """Whether a call changes the next: of other numbers between, or of other numbers of a shape seen first."""
    _outcome(subject, _one_token(subject, worlds()["peaked"]))
    seed(SEED)
    again = _outcome(subject, _one_token(subject, worlds()["far"]))
    if not _same(first, again):
        return f"the result is {_change(first, again)}"

    def mean_of(world: str, count: int) -> Tensor:
        seed(SEED)
        return subject.raw(_copies(worlds()[world], count)).detach().double().mean()

    fresh = mean_of("peaked", 5)
    mean_of("far", 6)
    after = mean_of("peaked", 6)
    summed = fresh * 6 / 5  # of a function that adds up its batch
    if _same(after, fresh) or _same(after, summed):
        return ""
    if not _same(
        mean_of("peaked", 7), fresh
    ):  # the size of the batch changes it: no matter of the calls before
        return ""
    return f"a batch of a new size gives {fresh.item():.6g}, and {after.item():.6g} after another batch of its size"


def _copies(world: World, count: int) -> Situation:
    """One token of the world several times."""
    p, q = (x.expand(count, VOCAB).unsqueeze(1) for x in (world.logits_p, world.logits_q))
    return make_situation(p.clone().requires_grad_(), q, torch.full((count, 1), 3))


def _refilled(subject: Subject) -> str:
    """Whether it looks at the tensors it is given, or remembers what once stood in them."""
    given, then = (_one_token(subject, worlds()[name]).copied() for name in ("far", "peaked"))
    seed(SEED)
    right = subject.raw(then).detach().double()
    subject.raw_in_place(given)
    with torch.no_grad():
        for field in fields(Situation):
            getattr(given, field.name).copy_(getattr(then, field.name))
    seed(SEED)
    try:
        found = subject.raw_in_place(given).detach().double()
    except KleashError:
        return ""  # what it did to its tensors before is a finding of its own
    return "" if _same(found, right) else f"the result is {_change(right.flatten(), found.flatten())}"


def _changed_inputs(subject: Subject) -> str:
    """Which of its arguments it overwrites."""
    changed: list[str] = []
    situations = [_one_token(subject, worlds()["far"]), *map(padded, PADDINGS)]
    for given in (*situations, situations[1].to(torch.bfloat16)):
        copies, originals = given.copied(), given.copied()
        with suppress(KleashError):
            subject.raw_in_place(copies)
        changed += [
            field.name
            for field in fields(Situation)
            if not _identical(getattr(copies, field.name).detach(), getattr(originals, field.name).detach())
        ]
    return f"it overwrote {', '.join(dict.fromkeys(changed))}" if changed else ""


def _identical(one: Tensor, other: Tensor) -> bool:
    """The same numbers, NaN where the other has NaN."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _settings() -> dict[str, object]:
    return {
        "whether gradients are computed": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": torch.get_num_threads(),
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _generators() -> Sequence[bytes]:
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return (
        torch.get_rng_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
        numpy_state[1].tobytes() + str(numpy_state[2]).encode(),
    )


def _changed_settings(subject: Subject, before: Mapping[str, object]) -> str:
    """Which settings of the process it leaves behind, its seed among them."""
    given = _one_token(subject, worlds()["far"])
    states: list[Sequence[bytes]] = []
    for number in (SEED, SEED + 1):
        seed(number)
        with suppress(KleashError):
            subject.raw_in_place(given.copied())
        states.append(_generators())
    after = _settings()
    torch.set_grad_enabled(True)
    changed = [name for name, value in after.items() if value != before[name]]
    names = ("torch's", "Python's", "numpy's")
    changed += [f"the seed of {name} generator" for name, a, b in zip(names, *states, strict=True) if a == b]
    return f"it changed {', '.join(changed)}" if changed else ""


def averaged(subject: Subject, purity: Purity, repeats: int) -> Subject:
    """The subject, averaged over calls where it is random."""
    return replace(subject, repeats=repeats) if purity.is_random else subject
