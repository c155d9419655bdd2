"""Purity: whether the result depends on the arguments alone, and the call changes nothing else."""

import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.batches import padded_inputs
from kleash.auditing.toy_distributions import (
    VOCAB_SIZE,
    AuditInputs,
    leaf_inputs,
    make_inputs,
    toy_distributions,
)
from kleash.errors import KleashError
from kleash.store.audit import Finding

CALLS, SERIES = 12, 34
"""Repeated calls of a function whose result does not change, and of one whose result does."""
FINAL_CALLS = 100
"""Calls before the last one, so that an audit makes more than two hundred."""
SEED = 20
PADDING_FILLS = ("other numbers", "p 200 nats below q", "q is -inf", "NaN")
"""The padding of the calls whose arguments are compared before and after."""
IMPURITY_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "stateful": "its result depends on earlier calls ({})",
        "changes_inputs": "it overwrites {}, which the caller may use again",
        "changes_settings": "it changes {}",
        "random": "its result is random, {}. Its values and gradients are means over many calls, and precision and "
        "padding were not tried",
    }
)
"""Kind of finding -> its sentence, with a detail."""


def check_purity(audited: AuditedFunction) -> tuple[Tensor, list[Finding]]:
    """The result of the first call, and the impurities that repeated calls and reused tensors show.

    Raises:
        CannotRunError, ShapeError: if the first call fails.
    """
    settings = {name: read() for name, (read, _) in SETTINGS.items()}
    first, noise, state = _result(audited), "", ""
    try:
        noise, state = _repeated_calls(audited, first)
        state = state or ("" if noise else _reused_tensors(audited))
    except KleashError as error:
        state = f"a later call fails: {error}"
    overwritten, changed = _overwritten_arguments(audited), _overwritten_settings(audited, settings)
    return first, impurities(
        stateful=state,
        changes_inputs=", ".join(dict.fromkeys(overwritten)),
        changes_settings=", ".join(changed),
        random=noise,
    )


def impurities(**details: str) -> list[Finding]:
    """A finding of each kind of ``IMPURITY_SENTENCES`` whose detail is not empty."""
    return [
        Finding(
            kind=kind,
            severity="note" if kind == "random" else "wrong",
            sentence=f"It is not pure: {IMPURITY_SENTENCES[kind].format(detail)}.",
        )
        for kind, detail in details.items()
        if detail
    ]


def check_final_call(audited: AuditedFunction, first: Tensor) -> list[Finding]:
    """The finding that the first call, made again at the end of the audit, gives another result than ``first``."""
    try:
        inputs = _far_inputs(audited)
        for _ in range(FINAL_CALLS):
            audited.call(inputs)
        difference = _difference(first, _result(audited))
    except KleashError as error:
        difference = f"a later call fails: {error}"
    return impurities(stateful=f"at the end of the audit {difference}" if difference else "")


def _result(audited: AuditedFunction, seed: int = SEED) -> Tensor:
    """Value and gradient of a call on the far pair in one flat tensor."""
    seed_generators(seed)
    inputs = _far_inputs(audited)
    values, gradients = audited.values_and_gradients(inputs, inputs)
    return torch.cat([values.flatten(), gradients]).double()


def _far_inputs(audited: AuditedFunction) -> AuditInputs:
    """Every token of the vocabulary as a response; only one response for a function that returns a mean."""
    return leaf_inputs("far").select(slice(2, 3) if audited.convention.gives == "mean" else slice(None))


def _difference(before: Tensor, after: Tensor) -> str:
    """The difference of two results that should be the same, at the entry that changed most; "" up to rounding."""
    if torch.allclose(before, after, rtol=1e-6, atol=1e-9, equal_nan=True):
        return ""
    entry = int((after - before).abs().nan_to_num(nan=torch.inf).argmax())
    return f"the result is {after[entry].item():.6g}, and was {before[entry].item():.6g}"


def _repeated_calls(audited: AuditedFunction, first: Tensor) -> tuple[str, str]:
    """What a random result depends on, or how earlier calls changed a later one, each "" if it is not so.

    The same call is repeated with the same seed, and if nothing changes with others.
    """
    differences = [_difference(first, _result(audited)) for _ in range(CALLS)]
    if not any(differences):
        by_seed = (_result(audited, SEED + offset) for offset in range(1, 5))
        is_seeded = any(_difference(first, result) for result in by_seed)
        return ("and depends on the seed of the process" if is_seeded else ""), ""
    if any(_is_unordered([_result(audited) for _ in range(SERIES)]) for _ in range(2)):
        return "from a separate generator", ""
    return "", next(filter(None, differences))


def _is_unordered(results: Sequence[Tensor]) -> bool:
    """Whether successive results look random: not monotonic, not periodic, not autocorrelated.

    About one random series in 400 is autocorrelated by chance; state shows in a second series as well.
    """
    weights = torch.linspace(0.5, 1.5, len(results[0]), dtype=torch.float64)
    series = torch.stack(list(results)).nan_to_num() @ weights
    steps, rounding = series.diff(), 1e-9 * series.abs().max()
    is_monotonic = bool((steps >= -rounding).all()) or bool((steps <= rounding).all())
    is_periodic = any(torch.allclose(series[:-n], series[n:], rtol=1e-9) for n in range(1, len(series) // 2))
    deviations = series - series.mean()
    autocorrelation = (deviations[1:] * deviations[:-1]).sum() / deviations.square().sum()
    return not is_monotonic and not is_periodic and bool(autocorrelation.abs() < 0.5)


def _reused_tensors(audited: AuditedFunction) -> str:
    """A call with new numbers in the tensors of an earlier call, compared with calls of two other batch sizes.

    No call before had a batch of this size, so that a function that remembers its arguments by shape or address finds
    nothing else. If the size itself changes the result, nothing is compared.
    """

    def repeated_token(toy_name: str, size: int) -> AuditInputs:
        toy = toy_distributions()[toy_name]
        p, q = (x.expand(size, VOCAB_SIZE).unsqueeze(1) for x in (toy.logits_p, toy.logits_q))
        return make_inputs(p.clone().requires_grad_(), q, torch.full((size, 1), 3)).clone()

    def mean(inputs: AuditInputs) -> Tensor:
        seed_generators(SEED)
        return audited.call_in_place(inputs).detach().double().mean().reshape(1)

    with suppress(KleashError):  # it refuses such a batch; overwritten arguments have their own check
        before, between = (mean(repeated_token("peaked", size)) for size in (5, 7))
        reused, new = repeated_token("far", 6), repeated_token("peaked", 6)
        mean(reused)
        with torch.no_grad():
            reused.mapped(lambda name, x: x.copy_(getattr(new, name)))
        difference = _difference(before, mean(reused))
        if difference and not _difference(before, between):
            return f"new numbers in the same tensors: {difference}"
    return ""


def _overwritten_arguments(audited: AuditedFunction) -> list[str]:
    """The names of arguments that the function overwrites."""
    names: list[str] = []
    padded = [padded_inputs(fill) for fill in PADDING_FILLS]
    for inputs in (_far_inputs(audited), *padded, padded[0].to(torch.bfloat16)):
        arguments = inputs.clone()
        with suppress(KleashError):
            audited.call_in_place(arguments)
        names += [
            name
            for name in (field.name for field in fields(AuditInputs))
            if not torch.allclose(getattr(inputs, name), getattr(arguments, name), 0, 0, equal_nan=True)
        ]
    return names


States = Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]]
"""Name in a sentence -> the functions that read and write a state of the process."""
SETTINGS: States = MappingProxyType(
    {
        "whether gradients are computed": (torch.is_grad_enabled, torch.set_grad_enabled),
        "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    }
)
GENERATORS: States = MappingProxyType(
    {
        "the seed of torch's generator": (
            lambda: torch.get_rng_state().numpy().tobytes(),
            lambda state: torch.set_rng_state(torch.tensor([*state], dtype=torch.uint8)),
        ),
        "the seed of Python's generator": (random.getstate, random.setstate),
        "the seed of numpy's generator": (np.random.get_state, np.random.set_state),
    }
)


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, Python and numpy."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for every kind of device
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def _overwritten_settings(audited: AuditedFunction, settings: Mapping[str, Any]) -> list[str]:
    """The names of settings of the process that the function changes, and of generators that it seeds.

    A generator that is in the same state after calls under two different seeds was seeded by the function.
    """
    states: list[dict[str, bytes]] = []
    for seed in (SEED, SEED + 1):
        seed_generators(seed)
        with suppress(KleashError):
            audited.call_in_place(_far_inputs(audited).clone())
        states.append({name: pickle.dumps(read()) for name, (read, _) in GENERATORS.items()})
    changed = [name for name, (read, _) in SETTINGS.items() if read() != settings[name]]
    torch.set_grad_enabled(True)
    return [*changed, *(name for name in GENERATORS if states[0][name] == states[1][name])]


@contextmanager
def restored_process_settings() -> Iterator[None]:
    """Restore the process's random generators and torch settings on exit."""
    states = [(write, read()) for read, write in (*SETTINGS.values(), *GENERATORS.values())]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            seed_generators(SEED)
            yield
    finally:
        for write, state in states:
            write(state)
