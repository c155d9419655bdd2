"""Hypotheses that score the same tokens again with the models, and see whether the differences vanish."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kleash.diagnosis.hypothesis import Hypothesis
from kleash.diagnosis.model_scores import ModelScores, Settings, Transform, at_temperature, cut
from kleash.diagnosis.residuals import DISTINCT, SMALLEST_DIFFERENCE, Floats, everywhere, rounding, token_unit
from kleash.diagnosis.rollout_records import LOG_OF_ZERO
from kleash.diagnosis.token_table import SHORT_DTYPES
from kleash.errors import KleashError
from kleash.models.weight_groups import WeightGroup, swapped_weights, weight_groups

SEARCH_STEPS = 16
SMALLEST_LOG_RATIO = 3e-4
"""Temperatures whose logarithms differ by less are equal."""
FITTED_SEQUENCES = 8
"""Responses on which changed prompts and weights are tried, before all are scored after the best."""
TRUNCATIONS: tuple[Settings, ...] = (
    *({"top_p": p} for p in (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)),
    *({"top_k": k} for k in (1, 5, 10, 20, 30, 40, 50, 64, 100, 200)),
    *({"min_p": m} for m in (0.01, 0.02, 0.05, 0.1, 0.2)),
    *({"top_k": k, "top_p": p} for k in (20, 50) for p in (0.8, 0.9, 0.95)),
)
"""Settings of truncated sampling that are tried."""
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
    yield from _temperatures(scores, limit)
    for side in ("engine", "trainer"):
        yield from _transformed(scores, side, limit)
        yield from _cuts(scores, side, limit)
        yield from _penalties(scores, side, limit)
    yield from _other_tokens(scores, limit)
    yield from _contexts(scores, limit)
    yield from _weights(scores, limit)
    yield from _modules(scores, limit)


def _predicted(
    scores: ModelScores, cause: str, side: str, values: Floats, limit: float, what: str, penalty: float = 1.0
) -> Hypothesis:
    """The hypothesis that one side's column has these values, and the other the policy's, up to rounding."""
    table = scores.table
    values = np.nan_to_num(values, nan=0.0, posinf=-LOG_OF_ZERO, neginf=LOG_OF_ZERO)
    rest = table.difference - (scores.policy - values if side == "engine" else values - scores.policy)
    before, after = (float(np.median(np.abs(each))) for each in (table.difference, rest))
    return Hypothesis(
        cause=cause,
        evidence=f"with {what}, the differences fall from {before:.2g} to {after:.2g} nats in the median",
        residual=rest,
        family=rounding(limit, MISTAKES),
        unit=np.maximum(table.unit, token_unit(values)),
        penalty=penalty,
        alike=(),
    )


def _distance(scores: ModelScores, side: str, transform: Transform, rows: np.ndarray) -> float:
    """Mean distance of a side's column from a transform of the policy's logits at some tokens."""
    column = getattr(scores.table, side)[rows]
    away = np.abs(np.nan_to_num(scores.column(transform, rows=rows), neginf=LOG_OF_ZERO) - column)
    return float(np.minimum(away, LARGEST_COUNTED).mean())


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
    rows = scores.sample

    def distance(log_temperature: float) -> float:
        return _distance(scores, side, at_temperature(math.exp(log_temperature)), rows)

    coarse = _minimum(distance, math.log(0.1), math.log(10.0))
    return math.exp(_minimum(distance, coarse - 0.01, coarse + 0.01))


def _temperatures(scores: ModelScores, limit: float) -> Iterator[Hypothesis]:
    """Both columns at temperatures of their own; which side is wrong follows from the drawn tokens."""
    trainer, engine = (fitted_temperature(scores, side) for side in ("trainer", "engine"))
    if abs(math.log(trainer / engine)) < SMALLEST_LOG_RATIO:
        return
    of_trainer, of_engine = (scores.column(at_temperature(value)) for value in (trainer, engine))
    values = scores.policy - of_trainer + of_engine
    what = f"the trainer at temperature {trainer:.4g} and the engine at {engine:.4g}"
    # It is also the log-likelihood of the tokens at the trainer's temperature less that at the engine's.
    drawn = float((of_trainer - of_engine).sum())
    for cause, penalty in (("temperature", drawn), ("processed", -drawn)):
        yield _predicted(scores, cause, "engine", values, limit, what, 2.0 + max(penalty, 0.0))


def _transformed(scores: ModelScores, side: str, limit: float) -> Iterator[Hypothesis]:
    """One side returns logits, or rounds them to 16 bits."""
    yield _predicted(
        scores, "processed", side, scores.column(lambda logits, rows: logits), limit, f"logits of the {side}"
    )
    for name, dtype in SHORT_DTYPES.items():
        values = scores.column(lambda logits, rows, dtype=dtype: logits.to(dtype).float().log_softmax(-1))
        yield _predicted(scores, "precision", side, values, limit, f"the {side}'s logits rounded to {name}")


def _cuts(scores: ModelScores, side: str, limit: float) -> Iterator[Hypothesis]:
    """One side is truncated and renormalised, perhaps at a temperature as well."""
    rows = scores.sample[:: max(1, len(scores.sample) // CUT_SAMPLE)]
    best = min(TRUNCATIONS, key=lambda settings: _distance(scores, side, cut(settings), rows))
    what = f"the {side} cut to {_described(best)}"
    yield _predicted(scores, "truncation", side, scores.column(cut(best)), limit, what, 2.0)
    start = fitted_temperature(scores, side)
    if side == "trainer" or abs(math.log(start)) < SMALLEST_LOG_RATIO:
        return
    tried = [(settings, factor * start) for settings in TRUNCATIONS for factor in (1.0, 1.2, 1.5)]
    best, temperature = min(tried, key=lambda pair: _distance(scores, side, cut(*pair), rows))
    for _ in range(2):
        log = _minimum(
            lambda log, settings=best: _distance(scores, side, cut(settings, math.exp(log)), rows),
            math.log(temperature / 1.3),
            math.log(temperature * 1.3),
        )
        temperature = math.exp(log)
        best = min(
            TRUNCATIONS, key=lambda settings, t=temperature: _distance(scores, side, cut(settings, t), rows)
        )
    what = f"the {side} at {temperature:.3g} and cut to {_described(best)}"
    hypothesis = _predicted(
        scores, "temperature", side, scores.column(cut(best, temperature)), limit, what, 4.0
    )
    yield replace(hypothesis, second_cause="truncation")


CUT_SAMPLE = 96
"""Tokens to which a truncation is fitted."""


def _described(settings: Settings) -> str:
    """Settings of truncated sampling in words: "top_k 20 and top_p 0.8"."""
    return " and ".join(f"{name} {value:g}" for name, value in settings.items())


def penalised(
    scores: ModelScores,
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    with_prompt: bool,
) -> Transform:
    """The transform to log-probabilities after penalties of the tokens that stand before each token."""

    def transform(logits: Tensor, rows: np.ndarray) -> Tensor:
        counts = scores.counts(rows, with_prompt=with_prompt).to(logits.device)
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        seen = counts > 0
        return (torch.where(seen, scaled, logits) - presence * seen - frequency * counts).log_softmax(-1)

    return transform


def _penalties(scores: ModelScores, side: str, limit: float) -> Iterator[Hypothesis]:
    """One side penalises the tokens that stand before."""
    rows = scores.sample[:: max(1, len(scores.sample) // PENALTY_SAMPLE)]
    for name, with_prompt, low, high in (
        ("repetition", True, 0.7, 2.5),
        ("repetition", False, 0.7, 2.5),
        ("presence", False, -2.0, 2.0),
        ("frequency", False, -2.0, 2.0),
    ):
        make = partial(penalised, scores, with_prompt=with_prompt)
        size = _minimum(lambda size, n=name, m=make: _distance(scores, side, m(**{n: size}), rows), low, high)
        where = "prompt and response" if with_prompt else "the response"
        what = f"a {name} penalty of {size:.3g} on tokens of {where} for the {side}"
        yield _predicted(scores, "penalty", side, scores.column(make(**{name: size})), limit, what, 2.0)


PENALTY_SAMPLE = 128
"""Tokens to which a penalty is fitted."""


def _other_tokens(scores: ModelScores, limit: float) -> Iterator[Hypothesis]:
    """A column has the values of other tokens than those that were drawn."""
    likeliest = scores.column(lambda logits, rows: logits.log_softmax(-1).max(-1, keepdim=True).values)
    ids, same = scores.table.token_id, np.diff(scores.table.sequence) == 0
    others = {"the likeliest token's log-probability": likeliest}
    for what, shifted in (
        ("the log-probability of the next token here", np.r_[np.where(same, ids[1:], ids[:-1]), ids[-1]]),
        ("the log-probability of the previous token here", np.r_[ids[0], np.where(same, ids[:-1], ids[1:])]),
    ):
        others[what] = scores.column(token_id=shifted)
    for side in ("engine", "trainer"):
        for what, values in others.items():
            yield _predicted(scores, "column", side, values, limit, f"{what} for the {side}")


def _contexts(scores: ModelScores, limit: float) -> Iterator[Hypothesis]:
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
    yield from _best_rescored(
        scores,
        "context",
        {what: partial(scores.with_prompts, change) for what, change in changes.items()},
        limit,
    )


def _best_rescored(
    scores: ModelScores, cause: str, ways: dict[str, Callable[..., Floats]], limit: float
) -> Iterator[Hypothesis]:
    """The hypothesis of the way of scoring that explains the first responses best, for one side."""
    trials: list[tuple[float, str, str]] = []
    for what, way in ways.items():
        values = way(FITTED_SEQUENCES)
        for side in ("engine", "trainer"):
            gap = scores.policy[: len(values)] - values
            rest = scores.table.difference[: len(values)] - (gap if side == "engine" else -gap)
            trials.append((float(np.minimum(np.abs(rest), LARGEST_COUNTED).mean()), what, side))
    if trials:
        _, what, side = min(trials)
        yield _predicted(scores, cause, side, ways[what](None), limit, f"{what} for the {side}", 2.0)


def _weights(scores: ModelScores, limit: float) -> Iterator[Hypothesis]:
    """One side has the reference's weights, or others that move the distributions in a way that repeats itself."""
    table = scores.table
    for side in ("engine", "trainer"):
        yield _predicted(
            scores, "weights", side, scores.reference, limit, f"the reference's weights for the {side}"
        )
    fault = max(SMALLEST_DIFFERENCE, DISTINCT * limit)
    side = wrong_side(scores)
    predicted = _systematic(scores)
    rest = table.difference - predicted
    removed = 1 - float(np.median(np.abs(rest)) / max(float(np.median(np.abs(table.difference))), 1e-12))
    yield Hypothesis(
        cause="weights",
        evidence=f"{removed:.0%} of the differences repeat themselves in other responses as a change of weights makes them",
        residual=rest,
        family=everywhere(fault / DISTINCT),
        unit=table.unit,
        penalty=1.0,
        alike=(),
    )
    if side == "trainer":
        yield Hypothesis(
            cause="dropout",
            evidence="the engine's log-probabilities are the policy's own, the trainer's are not, and its errors do not "
            "repeat themselves in other responses",
            residual=table.difference,
            family=everywhere(fault),
            unit=table.unit,
            alike=(),
        )


def wrong_side(scores: ModelScores) -> str | None:
    """The side whose column differs from the policy's own scores where the other's does not; None if neither or both."""
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
            own = projected[torch.from_numpy(table.token_id[part])]
            parts.append((own - logits.softmax(-1).cpu() @ projected).double().numpy())
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


def _modules(scores: ModelScores, limit: float) -> Iterator[Hypothesis]:
    """One side has the policy's weights in some kinds of modules and the reference's in the others."""
    policy, reference = scores.pair.policy, scores.pair.reference
    head_of_reference = scores.column(model=replace(policy, head=reference.head))
    without_head = scores.column(model=policy, hidden=scores.reference_hidden)
    for what, values in (
        ("the reference's head", head_of_reference),
        ("the policy's head on the reference's other weights", without_head),
    ):
        for side in ("engine", "trainer"):
            yield _predicted(scores, "modules", side, values, limit, f"{what} for the {side}")
    if policy.is_same_as(reference) or policy.network is reference.network:
        return
    try:
        groups = [group for group in weight_groups(policy, reference, "modules") if not group.is_identical]
    except KleashError:
        return
    for side in ("engine", "trainer"):
        chosen = _chosen_groups(scores, groups, side)
        if 0 < len(chosen) < len(groups):
            names = ", ".join(group.name for group in chosen)
            values = _with_groups(scores, chosen, None)
            what = f"the reference's weights in {names} for the {side}"
            yield _predicted(scores, "modules", side, values, limit, what, 1.0 + len(groups) * math.log(2))


def _with_groups(scores: ModelScores, groups: list[WeightGroup], sequences: int | None) -> Floats:
    """Log-probabilities of the first responses under the policy with groups of weights of the reference."""
    with swapped_weights(scores.pair.policy, scores.pair.reference, groups) as mixed:
        return scores.with_model(mixed, scores.sequences[:sequences])


def _chosen_groups(scores: ModelScores, groups: list[WeightGroup], side: str) -> list[WeightGroup]:
    """The groups of weights whose exchange explains the first responses best, found one by one."""
    count = len(_with_groups(scores, [], FITTED_SEQUENCES))
    sign = 1.0 if side == "engine" else -1.0
    difference = sign * scores.table.difference[:count]

    def distance(chosen: list[WeightGroup]) -> float:
        gap = scores.policy[:count] - _with_groups(scores, chosen, FITTED_SEQUENCES)
        return float(np.minimum(np.abs(difference - gap), LARGEST_COUNTED).mean())

    gaps = np.stack(
        [scores.policy[:count] - _with_groups(scores, [group], FITTED_SEQUENCES) for group in groups]
    )
    solution = np.linalg.lstsq(gaps.T, difference, rcond=None)[0]
    chosen = [group for group, part in zip(groups, solution, strict=True) if part > 0.5]
    best = distance(chosen)
    for group in groups:
        other = [each for each in groups if (each in chosen) != (each is group)]
        if (away := distance(other)) < best:
            chosen, best = other, away
    return chosen
