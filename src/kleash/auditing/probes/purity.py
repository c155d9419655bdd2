"""Purity: whether the result depends on the arguments alone, and the call changes nothing else."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.inputs import AuditInputs, make_inputs
from kleash.auditing.probes.padding import FILLS, padded_inputs
from kleash.auditing.toy_distributions import VOCAB_SIZE, ToyDistributions, toy_distributions
from kleash.errors import KleashError

GRADIENT_CALLS = 8
"""Repeated calls with the same numbers, value and gradient."""
VALUE_CALLS = 24
"""Further repeated calls, value only."""
REUSED_SETS = 12
"""Sets of tensors that are used for two calls each."""
FINAL_CALLS = 70
"""Repeated calls at the end of the audit, after several hundred others."""
SEED = 20

PADDING_FILLS = tuple(
    fill for fill in FILLS if fill.name in ("other numbers", "p 200 nats below q", "q is -inf", "NaN")
)
"""The padding of the calls whose arguments are compared before and after."""

Check = Literal["repeated", "other_inputs", "reused_tensors", "final", "arguments", "settings"]
Impurity = Literal[
    "changed",
    "changed_shape",
    "changed_by_batch_size",
    "error",
    "process_seed",
    "own_generator",
    "overwritten",
]


@dataclass(frozen=True, kw_only=True)
class PurityResult:
    """One check of a call: what was done, and how the call was impure."""

    check: Check
    impurity: Impurity | None = None
    before: float = float("nan")
    after: float = float("nan")
    """The entry of the result that changed most."""
    changed: tuple[str, ...] = ()
    """The arguments or settings that were overwritten."""
    error: str = ""
    failed_call: Literal["second", "later", "final"] = "later"
    """The call that raised ``error``."""

    @property
    def is_random(self) -> bool:
        """Whether the result is random."""
        return self.impurity in ("process_seed", "own_generator")

    @property
    def shows_state(self) -> bool:
        """Whether earlier calls change the result of later ones."""
        return (
            self.impurity is not None
            and not self.is_random
            and self.check
            not in (
                "arguments",
                "settings",
            )
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Purity:
    """The checks of repeated calls."""

    results: tuple[PurityResult, ...]
    first: Tensor
    """The result of the first call, to compare with one at the end of the audit."""

    @property
    def is_random(self) -> bool:
        """Whether results differ from call to call without any order."""
        return any(result.is_random for result in self.results)

    @property
    def has_state(self) -> bool:
        """Whether earlier calls change the result of later ones."""
        return any(result.shows_state for result in self.results)


@contextmanager
def restored_process_settings() -> Iterator[None]:
    """Restore the process's random generators and torch settings on exit."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - the process's own generator is meant
    dtype, threads, deterministic = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
    try:
        with torch.enable_grad():
            seed_generators(SEED)
            yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, Python and numpy."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for every kind of device
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def probe_purity(audited: AuditedFunction) -> Purity:
    """Call the function repeatedly, with other inputs in between and with tensors that are used again.

    Raises:
        CannotRunError, ShapeError: if the first call fails.
    """
    settings = _process_settings()
    seed_generators(SEED)
    first = _value_and_gradient(audited, _one_token_inputs(audited, "far"))
    results = [_check("repeated", _check_repeated_calls, audited, first)]
    if results[0].impurity is None:
        results.append(_check("other_inputs", _call_with_other_inputs, audited, first))
        results.append(_check("reused_tensors", _reuse_tensors, audited, first))
    results.append(_overwritten_arguments(audited))
    results.append(_overwritten_settings(audited, settings))
    return Purity(results=tuple(results), first=first)


def probe_final_call(audited: AuditedFunction, purity: Purity) -> PurityResult:
    """Repeat the first call at the end of the audit, unless impurity was found before."""
    if purity.is_random or purity.has_state:
        return PurityResult(check="final")
    inputs = _one_token_inputs(audited, "far")
    try:
        for _ in range(FINAL_CALLS):
            audited.call(inputs)
        seed_generators(SEED)
        result = _value_and_gradient(audited, inputs)
    except KleashError as error:
        return PurityResult(check="final", impurity="error", error=str(error), failed_call="final")
    return (
        PurityResult(check="final")
        if _is_same(result, purity.first)
        else _changed("final", purity.first, result)
    )


def _check(check: Check, probe: Callable[..., PurityResult | None], *arguments: Any) -> PurityResult:
    """The probe's result, or the error of a later call."""
    try:
        return probe(*arguments) or PurityResult(check=check)
    except KleashError as error:
        return PurityResult(check=check, impurity="error", error=str(error))


def _one_token_inputs(audited: AuditedFunction, toy_name: str) -> AuditInputs:
    """Every token of the vocabulary as a response; only one response for a function that returns a mean."""
    toy = toy_distributions()[toy_name]
    inputs = toy.inputs(toy.logits_p.clone().requires_grad_(), "on-policy")
    return inputs.select(slice(2, 3)) if audited.convention.gives == "mean" else inputs


def _value_and_gradient(audited: AuditedFunction, inputs: AuditInputs) -> Tensor:
    """Value and gradient of one call in one flat tensor."""
    result = audited.call(inputs)
    parts = [result.detach().double().flatten()]
    if audited.is_differentiated and result.requires_grad:
        leaves = [x for x in (inputs.token_logp, inputs.logp, inputs.logits_p) if x.requires_grad]
        gradients = audited.gradients(result.sum(), leaves, retain_graph=True)
        parts += [g.double().flatten() for g in gradients if g is not None]
    return torch.cat(parts)


def _value(audited: AuditedFunction, inputs: AuditInputs) -> Tensor:
    """The value of one call under the audit's seed, flat."""
    seed_generators(SEED)
    return audited.call(inputs).detach().double().flatten()


def _is_same(result: Tensor, other: Tensor) -> bool:
    """Whether two results agree up to rounding."""
    return result.shape == other.shape and torch.allclose(result, other, rtol=1e-6, atol=1e-9, equal_nan=True)


def _changed(check: Check, before: Tensor, after: Tensor) -> PurityResult:
    """The result of a check whose calls differ, with the entry that changed most."""
    if before.shape != after.shape:
        return PurityResult(check=check, impurity="changed_shape")
    entry = int((after - before).abs().nan_to_num(nan=torch.inf).argmax())
    return PurityResult(
        check=check, impurity="changed", before=before[entry].item(), after=after[entry].item()
    )


def _check_repeated_calls(audited: AuditedFunction, first: Tensor) -> PurityResult | None:
    """How the same call differs when it is repeated, with the same seed and then with others; None if it does not."""
    inputs = _one_token_inputs(audited, "far")
    results = [first]
    for _ in range(GRADIENT_CALLS):
        seed_generators(SEED)
        try:
            results.append(_value_and_gradient(audited, inputs))
        except KleashError as error:
            return PurityResult(check="repeated", impurity="error", error=str(error), failed_call="second")
    values = [_value(audited, inputs) for _ in range(VALUE_CALLS + 1)]
    if not all(_is_same(values[0], value) for value in values):
        results = values
    first = results[0]
    different = next((result for result in results if not _is_same(first, result)), None)
    if different is None:
        for offset in range(4):
            seed_generators(SEED + 1 + offset)
            if not _is_same(results[-1], _value_and_gradient(audited, inputs)):
                return PurityResult(check="repeated", impurity="process_seed")
        return None
    if any(result.shape != first.shape for result in results):
        return _changed("repeated", first, different)
    if _is_unordered(results) or _is_unordered([_value(audited, inputs) for _ in range(VALUE_CALLS + 1)]):
        return PurityResult(check="repeated", impurity="own_generator")
    return _changed("repeated", first, different)


def _is_unordered(results: Sequence[Tensor]) -> bool:
    """Whether successive results look random: not monotonic, not periodic, not autocorrelated.

    About one random series in 120 is autocorrelated by chance; state shows in a second series as well.
    """
    if any(result.shape != results[0].shape for result in results):
        return False
    weights = torch.linspace(0.5, 1.5, len(results[0]), dtype=torch.float64)
    series = torch.stack(list(results)).nan_to_num() @ weights
    steps, rounding = series.diff(), 1e-9 * series.abs().max()
    if bool((steps >= -rounding).all()) or bool((steps <= rounding).all()):
        return False
    if any(torch.allclose(series[:-n], series[n:], rtol=1e-9) for n in range(1, len(series) // 2)):
        return False
    deviations = series - series.mean()
    autocorrelation = (deviations[1:] * deviations[:-1]).sum() / deviations.square().sum()
    return bool(autocorrelation.abs() < 0.5)


def _call_with_other_inputs(audited: AuditedFunction, first: Tensor) -> PurityResult | None:
    """Repeat the first call after a call with other numbers, and one batch size after another batch of it."""
    _value_and_gradient(audited, _one_token_inputs(audited, "peaked"))
    seed_generators(SEED)
    result = _value_and_gradient(audited, _one_token_inputs(audited, "far"))
    if not _is_same(first, result):
        return _changed("other_inputs", first, result)

    def mean_of(pair: str, count: int) -> Tensor:
        return _value(audited, _repeated_token(toy_distributions()[pair], count)).mean()

    before = mean_of("peaked", 5)
    mean_of("far", 6)
    after = mean_of("peaked", 6)
    before_as_sum = before * 6 / 5  # for a function that sums over its batch
    if _is_same(after, before) or _is_same(after, before_as_sum):
        return None
    if not _is_same(mean_of("peaked", 7), before):  # the batch size itself changes the result
        return None
    return PurityResult(
        check="other_inputs", impurity="changed_by_batch_size", before=before.item(), after=after.item()
    )


def _repeated_token(toy: ToyDistributions, count: int) -> AuditInputs:
    """One token, ``count`` times."""
    p, q = (x.expand(count, VOCAB_SIZE).unsqueeze(1) for x in (toy.logits_p, toy.logits_q))
    return make_inputs(p.clone().requires_grad_(), q, torch.full((count, 1), 3))


def _reuse_tensors(audited: AuditedFunction, first: Tensor) -> PurityResult | None:
    """Whether a call with new numbers in the tensors of an earlier call gives the earlier result.

    The new numbers are those of the first call. A function that remembers addresses may have seen them at an address
    before, so that several sets of tensors exist at a time, each at addresses of its own.
    """
    new_inputs = _one_token_inputs(audited, "far")
    for inputs in [_one_token_inputs(audited, "peaked").clone() for _ in range(REUSED_SETS)]:
        seed_generators(SEED)
        audited.call_in_place(inputs)
        with torch.no_grad():
            for field in fields(AuditInputs):
                getattr(inputs, field.name).copy_(getattr(new_inputs, field.name))
        seed_generators(SEED)
        try:
            result = audited.call_in_place(inputs).detach().double().flatten()
        except KleashError:
            return None  # overwritten arguments have their own check
        expected = first[: len(result)]
        if not _is_same(result, expected):
            return _changed("reused_tensors", expected, result)
    return None


def _overwritten_arguments(audited: AuditedFunction) -> PurityResult:
    """The check for arguments that the function overwrites."""
    names: list[str] = []
    batches = [_one_token_inputs(audited, "far"), *map(padded_inputs, PADDING_FILLS)]
    for inputs in (*batches, batches[1].to(torch.bfloat16)):
        arguments, originals = inputs.clone(), inputs.clone()
        with suppress(KleashError):
            audited.call_in_place(arguments)
        names += [
            field.name
            for field in fields(AuditInputs)
            if not _is_identical(
                getattr(arguments, field.name).detach(), getattr(originals, field.name).detach()
            )
        ]
    return _overwritten("arguments", names)


def _overwritten(check: Check, names: Sequence[str]) -> PurityResult:
    """The result of a check for overwritten arguments or settings."""
    if not names:
        return PurityResult(check=check)
    return PurityResult(check=check, impurity="overwritten", changed=tuple(dict.fromkeys(names)))


def _is_identical(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and values, with NaN at the same entries."""
    return tensor.shape == other.shape and bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


def _process_settings() -> dict[str, object]:
    """The settings of torch that a function could change, by their names in sentences."""
    return {
        "whether gradients are computed": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": torch.get_num_threads(),
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _generator_states() -> dict[str, bytes]:
    """The states of the random generators of torch, Python and numpy."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return {
        "torch's": torch.get_rng_state().numpy().tobytes(),
        "Python's": repr(random.getstate()).encode(),
        "numpy's": numpy_state[1].tobytes() + str(numpy_state[2]).encode(),
    }


def _overwritten_settings(audited: AuditedFunction, settings: dict[str, object]) -> PurityResult:
    """The check for settings of the process that the function changes, including the seeds of its generators.

    A generator that is in the same state after calls under two different seeds was seeded by the function.
    """
    inputs = _one_token_inputs(audited, "far")
    states: list[dict[str, bytes]] = []
    for seed in (SEED, SEED + 1):
        seed_generators(seed)
        with suppress(KleashError):
            audited.call_in_place(inputs.clone())
        states.append(_generator_states())
    settings_after = _process_settings()
    torch.set_grad_enabled(True)
    names = [name for name, value in settings_after.items() if value != settings[name]]
    names += [f"the seed of {name} generator" for name in states[0] if states[0][name] == states[1][name]]
    return _overwritten("settings", names)
