"""Hypotheses that score the same tokens again with the models, and see whether the differences vanish."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kleash.diagnosis.hypothesis import Hypothesis
from kleash.diagnosis.model_scores import (
    ModelScores,
    Transform,
    at_temperature,
    cut,
)
from kleash.diagnosis.residuals import (
    DISTINCT,
    MACHINE_EPSILON,
    SMALLEST_DIFFERENCE,
    Floats,
    everywhere,
    rounding,
    token_unit,
)
from kleash.diagnosis.rollout_records import LOG_OF_ZERO
from kleash.errors import KleashError
from kleash.models.weight_groups import WeightGroup, swapped_weights, weight_groups

SEARCH_STEPS = 16
SMALLEST_LOG_RATIO = 3e-4
"""Temperatures whose logarithms differ by less are equal."""
FITTED_SEQUENCES = 8
"""Responses on which changed prompts and weights are tried, before all are scored after the best."""
CUTS: Mapping[str, tuple[float, float, Callable[[float], float]]] = {
    "top_p": (1e-4, 0.9, lambda strength: 1 - strength),
    "top_k": (1 / 5000, 1.0, lambda strength: round(1 / strength)),
    "min_p": (1e-5, 0.9, lambda strength: strength),
}
"""Setting of truncated sampling -> the bounds of its strength, and the value at a strength."""
LARGEST_COUNTED = 3.0
"""Nats above which a distance counts as this much in a fit: a token outside a cut has any difference."""
MISTAKES = 0.02
"""Share of outliers that a right prediction leaves at most."""
ONE_SIDE = 3.0
"""Ratio of the distances of the two columns from the policy's own scores from which one side alone is wrong."""


def model_hypotheses(scores: ModelScores, limit: float) -> Iterator[Hypothesis]:
    """The hypotheses that predict one column from the models where the other is the policy's own.

    Args:
        scores: of the models.
        limit: the largest error of logits that rounding explains, in nats.
    """
    if not scores.table.difference.any():
        return
    wrong = wrong_side(scores)
    sides = ("engine", "trainer") if wrong is None else (wrong,)
    yield from _temperatures(scores, limit)
    for side in sides:
        for cause, what, transform in TRANSFORMS:
            if cause == "precision" and limit > MACHINE_EPSILON["bfloat16"]:
                continue  # as coarse as the networks may be
            yield from _candidate(scores, cause, side, transform, limit, f"{what} of the {side}")
        yield from _cuts(scores, side, limit)
        yield from _penalties(scores, side, limit)
    yield from _contexts(scores, sides, limit)
    yield from _models(scores, sides, limit)
    yield from _weights(scores, limit, wrong)
    yield from _modules(scores, sides, limit)


def _predicted(
    scores: ModelScores, cause: str, side: str, values: Floats, limit: float, what: str, penalty: float = 1.0
) -> Hypothesis:
    """The hypothesis that one side's column has these values, and the other the policy's, up to rounding."""
    table = scores.table
    rest = _rest(table.difference, scores.policy, values, side)
    before, after = (float(np.median(np.abs(each))) for each in (table.difference, rest))
    return Hypothesis(
        cause=cause,
        evidence=f"with {what}, the differences fall from {before:.2g} to {after:.2g} nats in the median",
        residual=rest,
        family=rounding(limit, MISTAKES),
        unit=np.maximum(table.unit, token_unit(values)),
        penalty=penalty,
    )


def _rest(difference: Floats, policy: Floats, values: Floats, side: str) -> Floats:
    """What is left of the differences if a side's column has ``values`` where the policy's are right."""
    finite = np.nan_to_num(values, nan=0.0, posinf=-LOG_OF_ZERO, neginf=LOG_OF_ZERO)
    return difference - (policy - finite if side == "engine" else finite - policy)


def _size(rest: Floats) -> float:
    """Mean size of differences, in nats, each at most ``LARGEST_COUNTED``."""
    return float(np.minimum(np.abs(rest), LARGEST_COUNTED).mean())


def _distance(scores: ModelScores, side: str, transform: Transform, step: int = 1) -> float:
    """Mean size of what is left at the sample's tokens if a side's column is a transform of the policy's logits."""
    rows = scores.sample[::step]
    values = scores.sampled(transform, step=step)
    return _size(_rest(scores.table.difference[rows], scores.policy[rows], values, side))


def _candidate(
    scores: ModelScores,
    cause: str,
    side: str,
    transform: Transform,
    limit: float,
    what: str,
    penalty: float = 1.0,
) -> Iterator[Hypothesis]:
    """The hypothesis of a transform for a side, if it makes the differences of the sample's tokens smaller."""
    if _explains(scores, side, scores.sampled(transform), scores.sample):
        yield _predicted(scores, cause, side, scores.column(transform), limit, what, penalty)


def _explains(scores: ModelScores, side: str, values: Floats, rows: np.ndarray) -> bool:
    """Whether the values of some tokens, for a side's column, make the differences smaller."""
    difference = scores.table.difference[rows]
    return _size(_rest(difference, scores.policy[rows], values, side)) < SMALLER * _size(difference)


SMALLER = 0.7
"""Share of the differences that a prediction leaves at most, to be examined at all tokens."""
TRANSFORMS: tuple[tuple[str, str, Transform], ...] = (
    ("processed", "logits", lambda logits, rows: logits),
    ("precision", "logits in bfloat16", lambda logits, rows: logits.bfloat16().float().log_softmax(-1)),
    (
        "column",
        "the likeliest token's log-probability",
        lambda logits, rows: logits.log_softmax(-1).max(-1, keepdim=True).values,
    ),
)
"""Cause, what it is, and the transform from the policy's logits to the column."""


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function with one minimum, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(SEARCH_STEPS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def fitted_temperature(scores: ModelScores, side: str) -> float:
    """The temperature at which the policy's log-probabilities are nearest to a column, in mean absolute difference."""
    column = getattr(scores.table, side)[scores.sample]

    def distance(log_temperature: float) -> float:
        return float(np.abs(scores.sampled(at_temperature(math.exp(log_temperature))) - column).mean())

    coarse = _minimum(distance, math.log(0.1), math.log(10.0))
    return math.exp(_minimum(distance, coarse - 0.01, coarse + 0.01))


def _temperatures(scores: ModelScores, limit: float) -> Iterator[Hypothesis]:
    """Both columns at temperatures of their own, perhaps the engine cut as well; the drawn tokens tell which errs."""
    trainer, engine = (fitted_temperature(scores, side) for side in ("trainer", "engine"))
    if abs(math.log(trainer / engine)) < SMALLEST_LOG_RATIO:
        return
    rows = scores.sample
    gaps = scores.sampled(at_temperature(trainer)) - scores.sampled(at_temperature(engine))
    left, before = (
        _size(rest) for rest in (scores.table.difference[rows] - gaps, scores.table.difference[rows])
    )
    if left < SMALLER * before:
        of_trainer, of_engine = (scores.column(at_temperature(value)) for value in (trainer, engine))
        values = scores.policy - of_trainer + of_engine
        what = f"the trainer at temperature {trainer:.4g} and the engine at {engine:.4g}"
        # It is also the log-likelihood of the tokens at the trainer's temperature less that at the engine's.
        drawn = float((of_trainer - of_engine).sum())
        for cause, penalty in (("temperature", drawn), ("processed", -drawn)):
            yield _predicted(scores, cause, "engine", values, limit, what, 2.0 + max(penalty, 0.0))


def _cuts(scores: ModelScores, side: str, limit: float) -> Iterator[Hypothesis]:
    """One side is truncated and renormalised, so that it is the larger one wherever the two differ."""
    difference = scores.table.difference
    is_large = np.abs(difference) > 0.01 * np.abs(difference).max()
    if np.mean((difference[is_large] < 0) == (side == "engine")) < ONE_SIDED:
        return
    fits: list[tuple[float, str, Transform]] = []
    for name, (low, high, value) in CUTS.items():

        def transform(log_strength: float, name: str = name, value: Any = value) -> Transform:
            return cut({name: value(math.exp(log_strength))})

        # The stronger the cut, the larger every prediction, so that the distance has one minimum.
        left, best = _fitted(scores, side, transform, math.log(low), math.log(high))
        fits.append((left, f"{name} {value(math.exp(best)):.4g}", transform(best)))
    _, what, best_cut = min(fits, key=lambda fit: fit[0])
    yield from _candidate(scores, "truncation", side, best_cut, limit, f"the {side} cut to {what}", 2.0)


def _fitted(
    scores: ModelScores, side: str, transform: Callable[[float], Transform], low: float, high: float
) -> tuple[float, float]:
    """What the best strength of a transform leaves of some differences, and that strength, between two bounds."""

    def distance(strength: float) -> float:
        return _distance(scores, side, transform(strength), max(1, len(scores.sample) // FITTED_SAMPLE))

    best = _minimum(distance, low, high)
    return distance(best), best


FITTED_SAMPLE = 192
"""Tokens to which a truncation or a penalty is fitted."""
ONE_SIDED = 0.9
"""Share of the larger differences that a truncation makes of one sign."""


def penalised(counts: Callable[[np.ndarray], Tensor], name: str, size: float) -> Transform:
    """The transform to log-probabilities after a penalty of the tokens that stand before each token.

    Args:
        counts: from indices of tokens to how often each token of the vocabulary stands before them.
        name: "repetition", "presence" or "frequency".
        size: of the penalty; 1 is none for repetition, 0 for the others.
    """

    def transform(logits: Tensor, rows: np.ndarray) -> Tensor:
        before = counts(rows).to(logits.device)
        if name == "repetition":
            changed = torch.where(logits > 0, logits / size, logits * size)
        else:
            changed = logits - size * (before if name == "frequency" else 1.0)
        return torch.where(before > 0, changed, logits).log_softmax(-1)

    return transform


def _penalties(scores: ModelScores, side: str, limit: float) -> Iterator[Hypothesis]:
    """One side penalises the tokens that stand before."""
    step = max(1, len(scores.sample) // FITTED_SAMPLE)
    for name, with_prompt, low, high in (
        ("repetition", True, 0.7, 2.5),
        ("repetition", False, 0.7, 2.5),
        ("presence", False, -2.0, 2.0),
        ("frequency", False, -2.0, 2.0),
    ):
        counts = partial(scores.counts, with_prompt=with_prompt)
        of_sample = counts(scores.sample[::step])
        fixed = partial(penalised, lambda _, c=of_sample: c, name)
        _, size = _fitted(scores, side, fixed, low, high)
        where = "prompt and response" if with_prompt else "the response"
        what = f"a {name} penalty of {size:.3g} on tokens of {where} for the {side}"
        yield from _candidate(scores, "penalty", side, penalised(counts, name, size), limit, what, 2.0)


def _contexts(scores: ModelScores, sides: Sequence[str], limit: float) -> Iterator[Hypothesis]:
    """One side reads a prompt with a special token more or less at its beginning, or a token less at its end."""
    tokenizer = scores.pair.tokenizer
    changes: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name, None)
        if isinstance(token, int):
            changes[f"{name.removesuffix('_token_id').upper()} before the prompt"] = lambda ids, t=token: (
                t,
                *ids,
            )
    if all(len(sequence.prompt_ids) > 1 for sequence in scores.sequences):
        changes["the prompt without its first token"] = lambda ids: ids[1:]
        changes["the prompt without its last token"] = lambda ids: ids[:-1]
    newline = tokenizer.encode("\n", add_special_tokens=False) if tokenizer is not None else []
    if len(newline) == 1:
        changes["a line break after the prompt"] = lambda ids: (*ids, newline[0])
    limit_tokens = scores.pair.context_length
    longest = max(sequence.num_input_tokens for sequence in scores.sequences)
    if limit_tokens is not None and longest + 1 > limit_tokens:
        changes = {what: change for what, change in changes.items() if "without" in what}
    for what, change in changes.items():
        values = scores.with_prompts(change, FITTED_SEQUENCES)
        for side in sides:
            if _explains(scores, side, values, np.arange(len(values))):
                whole = scores.with_prompts(change)
                yield _predicted(scores, "context", side, whole, limit, f"{what} for the {side}", 3.0)


def _models(scores: ModelScores, sides: Sequence[str], limit: float) -> Iterator[Hypothesis]:
    """One side has the reference's weights, or the head of one model on the other weights of the other."""
    policy, reference, rows = scores.pair.policy, scores.pair.reference, scores.sample
    gap = _size(scores.policy - scores.reference)
    for cause, what, model, hidden in (
        ("weights", "the reference's weights", reference, scores.reference_hidden),
        ("modules", "the reference's head", replace(policy, head=reference.head), scores.hidden),
        ("modules", "the policy's head on the reference's other weights", policy, scores.reference_hidden),
    ):
        values = scores.column(rows=rows, model=model, hidden=hidden[torch.from_numpy(rows)])
        if cause == "modules" and _size(values - scores.reference[rows]) < 0.1 * gap:
            continue
        for side in sides:
            if _explains(scores, side, values, rows):
                whole = scores.column(model=model, hidden=hidden)
                yield _predicted(scores, cause, side, whole, limit, f"{what} for the {side}")


def _weights(scores: ModelScores, limit: float, wrong: str | None) -> Iterator[Hypothesis]:
    """One side has other weights, which move the distributions in a way that repeats itself, or the trainer dropout."""
    table = scores.table
    fault = max(SMALLEST_DIFFERENCE, DISTINCT * limit)
    if float(np.median(np.abs(table.difference) / np.maximum(table.unit, 1e-12))) < fault / DISTINCT:
        return
    predicted = _systematic(scores)
    rest = table.difference - predicted
    removed = 1 - float(np.median(np.abs(rest)) / max(float(np.median(np.abs(table.difference))), 1e-12))
    yield Hypothesis(
        cause="weights",
        evidence=f"{removed:.0%} of the differences repeat themselves in other responses, as those of other weights do",
        residual=rest,
        family=everywhere(fault / DISTINCT),
        unit=table.unit,
        penalty=1.0,
    )
    if wrong == "trainer":
        yield Hypothesis(
            cause="dropout",
            evidence="the engine's log-probabilities are the policy's own, the trainer's are not, and its errors do "
            "not repeat themselves in other responses",
            residual=table.difference,
            family=everywhere(fault / DISTINCT),
            unit=table.unit,
            penalty=3.0,
        )


def wrong_side(scores: ModelScores) -> str | None:
    """The side whose column alone differs from the policy's own scores; None if neither or both do."""
    table = scores.table
    trainer, engine = (
        float(np.median(np.abs(column - scores.policy)[table.unit > 1e-3]))
        for column in (table.trainer, table.engine)
    )
    if max(trainer, engine) < ONE_SIDE * min(trainer, engine):
        return None
    return "trainer" if trainer > engine else "engine"


def _systematic(scores: ModelScores) -> Floats:
    """The differences as a change of the weights predicts them, by ridge regression on the other fold's tokens.

    A constant change b of the final hidden states moves the log-probability of token x by (e_x - E_p e) b, with e the
    rows of the head, here projected at random; and the weights may lie on the way to the reference.
    """
    table, weight = scores.table, scores.pair.policy.head.weight
    parts = [(scores.policy - scores.reference)[:, None]]
    if weight is not None:
        project = torch.eye(weight.shape[1])
        if weight.shape[1] > PROJECTED:
            draw = torch.Generator().manual_seed(0)
            project = torch.randn(weight.shape[1], PROJECTED, generator=draw) / PROJECTED**0.5
        projected = weight.float().cpu() @ project
        for logits, part in scores.blocks(np.arange(len(table.trainer))):
            drawn = projected[torch.from_numpy(table.token_id[part])]
            parts.append((drawn - logits.softmax(-1).cpu() @ projected).double().numpy())
        parts = [parts[0], np.concatenate(parts[1:])]
    features = np.concatenate(parts, axis=1)
    unit = np.maximum(table.unit, 1e-3)
    predicted = np.zeros(len(unit))
    for number in (0, 1):
        train, test = table.fold != number, table.fold == number
        left, right = features[train] / unit[train, None], (table.difference / unit)[train]
        bound = 5 * float(np.median(np.abs(right))) + 1e-12
        right = np.clip(right, -bound, bound)
        penalty = RIDGE * np.eye(features.shape[1]) * float((left**2).sum() / features.shape[1])
        predicted[test] = features[test] @ np.linalg.solve(left.T @ left + penalty, left.T @ right)
    return predicted


PROJECTED, RIDGE = 192, 0.01


def _modules(scores: ModelScores, sides: Sequence[str], limit: float) -> Iterator[Hypothesis]:
    """One side has the policy's weights in some kinds of modules and the reference's in the others."""
    policy, reference = scores.pair.policy, scores.pair.reference
    gap, difference = (
        values / np.maximum(scores.table.unit, 1e-3)
        for values in (scores.policy - scores.reference, scores.table.difference)
    )
    likeness = float(np.mean(np.sign(gap) * np.sign(difference)))
    side = "engine" if likeness > 0 else "trainer"
    if (
        abs(likeness) * len(gap) ** 0.5 < LEAST_LIKENESS
        or side not in sides
        or policy.network is reference.network
    ):
        return
    try:
        groups = [group for group in weight_groups(policy, reference, "modules") if not group.is_identical]
    except KleashError:  # networks of two architectures, or of two dtypes
        return
    chosen = _chosen_groups(scores, groups, side)
    if 0 < len(chosen) < len(groups):
        names = ", ".join(group.name for group in chosen)
        what = f"the reference's weights in {names} for the {side}"
        values = _with_groups(scores, chosen, None)
        yield _predicted(scores, "modules", side, values, limit, what, 1.0 + len(groups) * math.log(2))


LEAST_LIKENESS = 4.0
"""Standard errors by which the signs of the differences agree with those of policy minus reference, at least."""


def _with_groups(scores: ModelScores, groups: list[WeightGroup], sequences: int | None) -> Floats:
    """Log-probabilities of the first responses under the policy with groups of weights of the reference."""
    with swapped_weights(scores.pair.policy, scores.pair.reference, groups) as mixed:
        return scores.with_model(mixed, scores.sequences[:sequences])


def _chosen_groups(scores: ModelScores, groups: list[WeightGroup], side: str) -> list[WeightGroup]:
    """The groups of weights whose exchange explains the first responses best: by regression, then one by one."""

    def values(chosen: list[WeightGroup]) -> Floats:
        return _with_groups(scores, chosen, FITTED_SEQUENCES)

    alone = np.stack([values([group]) for group in groups])
    policy, difference = (each[: alone.shape[1]] for each in (scores.policy, scores.table.difference))
    sign = 1.0 if side == "engine" else -1.0
    solution = np.linalg.lstsq((policy - alone).T, sign * difference, rcond=None)[0]
    chosen = [group for group, part in zip(groups, solution, strict=True) if part > 0.5]
    best = _size(_rest(difference, policy, values(chosen), side))
    if best > SMALLER * _size(difference):
        return []
    for group in groups:
        other = [each for each in groups if (each in chosen) != (each is group)]
        if (left := _size(_rest(difference, policy, values(other), side))) < best:
            chosen, best = other, left
    return chosen
