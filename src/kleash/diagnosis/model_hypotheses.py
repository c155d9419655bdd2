"""What the models show: hypotheses that score the tokens again, and whether the tokens were drawn from the columns."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from kleash.diagnosis.causes import HEALTHY, likely_cause
from kleash.diagnosis.hypothesis import Hypothesis
from kleash.diagnosis.model_scores import ModelScores, Transform, at_temperature, log_probabilities
from kleash.diagnosis.residuals import (
    DISTINCT,
    MISTAKES,
    NEARLY_ALL,
    SMALLEST_DIFFERENCE,
    Floats,
    everywhere,
    most,
    rounding,
    token_unit,
)
from kleash.diagnosis.rollout_records import LOG_OF_ZERO
from kleash.divergences import truncate
from kleash.errors import KleashError
from kleash.models.weight_groups import WeightGroup, swapped_weights, weight_groups
from kleash.store.rollout_results import LikelyCause

SEARCH_STEPS = 16
SMALLEST_LOG_RATIO = 3e-4
"""Temperatures whose logarithms differ by less are equal."""
ALTERNATIONS = 3
"""How often a temperature and another setting are fitted in turn."""
LARGEST_COUNTED = 3.0
"""Nats above which a distance counts as this much in a fit: a token outside a cut has any difference."""
SMALLER = 0.7
"""Share of the differences that a prediction leaves at most on a few tokens, to be examined at all of them."""
ONE_SIDE = 3.0
"""Ratio of the distances of the two columns from the policy's own scores from which one side alone is wrong."""
PROJECTED, RIDGE = 192, 0.01
PARTIAL, UNCLEAR, SMALL_CHANGE, MOST_NAMED = 0.1, 0.3, 0.05, 4
"""Distance of a share from 0 or 1 from which a part of the modules of a kind differs, and from a half up to which a
module is tried with and without; nats up to which changes add up; and the number of modules that are named."""


SHORT_LOGITS = {"8-bit floats": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types to which a side may round its logits, before a temperature divides them."""


class Prediction(NamedTuple):
    """What one side's column may hold in the place of the policy's log-probabilities."""

    cause: str
    what: str
    column: Callable[[ModelScores], Floats]
    penalty: float = 1.0


def model_hypotheses(scores: ModelScores, limit: float) -> Iterator[Hypothesis]:
    """The hypotheses that predict one column from the models where the other is the policy's own.

    Args:
        scores: of the models.
        limit: the largest error of logits that rounding explains, in nats.
    """
    if not scores.table.difference.any():
        return
    few, wrong = scores.few(), wrong_side(scores)
    sides = ("engine", "trainer") if wrong is None else (wrong,)
    yield from _temperatures(scores, few, limit)
    before = _size(few.table.difference)
    for side in sides:
        for prediction in (*_columns(few, limit), *_fits(few, side, limit), *_modules(few, side)):
            if _size(_rest(few, prediction.column(few), side)) < SMALLER * before:
                yield _predicted(scores, prediction, side, limit)
    yield _weights(scores, limit)


def _predicted(scores: ModelScores, prediction: Prediction, side: str, limit: float) -> Hypothesis:
    """The hypothesis that one side's column is as predicted, and the other the policy's, up to rounding."""
    values, table = prediction.column(scores), scores.table
    rest = _rest(scores, values, side)
    before, after = (float(np.median(np.abs(each))) for each in (table.difference, rest))
    return Hypothesis(
        cause=prediction.cause,
        evidence=f"with {prediction.what} for the {side}, the differences fall from {before:.2g} to {after:.2g} nats "
        "in the median",
        residual=rest,
        family=rounding(limit, MISTAKES),
        unit=np.maximum(table.unit, token_unit(values)),
        penalty=prediction.penalty,
    )


def _rest(scores: ModelScores, values: Floats, side: str) -> Floats:
    """What is left of the differences if a side's column has ``values`` where the policy's are right."""
    finite = np.nan_to_num(values, nan=0.0, posinf=-LOG_OF_ZERO, neginf=LOG_OF_ZERO)
    return scores.table.difference - (1.0 if side == "engine" else -1.0) * (scores.policy - finite)


def _size(rest: Floats) -> float:
    """Mean size of differences, in nats, each at most ``LARGEST_COUNTED``."""
    return float(np.minimum(np.abs(rest), LARGEST_COUNTED).mean())


def _columns(few: ModelScores, limit: float) -> Iterator[Prediction]:
    """What a column may hold without a setting that is fitted: other values, other prompts, the reference's weights."""

    transforms: list[tuple[str, str, Transform]] = [
        ("processed", "logits", lambda logits, rows: logits),
        (
            "column",
            "the likeliest token's log-probability",
            lambda logits, rows: logits.log_softmax(-1).amax(-1, keepdim=True),
        ),
        *(
            (
                "precision",
                f"logits in {name}",
                lambda logits, rows, t=dtype: (
                    (logits * few.temperature).to(t).float() / few.temperature
                ).log_softmax(-1),
            )
            for name, dtype in SHORT_LOGITS.items()
            if limit < torch.finfo(dtype).eps  # else the networks may be as coarse
        ),
    ]
    for cause, what, transform in transforms:
        yield Prediction(cause, what, lambda scores, transform=transform: scores.column(transform))
    yield Prediction("weights", "the reference's weights", lambda scores: scores.reference)
    for what, change in _changed_prompts(few):
        yield Prediction(
            "context",
            what,
            lambda scores, change=change: scores.with_model(scores.pair.policy, change),
            penalty=3.0,
        )


def _changed_prompts(
    scores: ModelScores,
) -> Iterator[tuple[str, Callable[[tuple[int, ...]], tuple[int, ...]]]]:
    """A special token more or less at the beginning of a prompt, a line break more or a token less at its end."""
    tokenizer, most = scores.pair.tokenizer, scores.pair.context_length
    if most is None or max(sequence.num_input_tokens for sequence in scores.sequences) < most:
        for name in ("bos", "eos", "pad"):
            token = getattr(tokenizer, f"{name}_token_id", None)
            if isinstance(token, int):
                yield f"{name.upper()} before the prompt", lambda ids, token=token: (token, *ids)
        newline = tokenizer.encode("\n", add_special_tokens=False) if tokenizer is not None else []
        if len(newline) == 1:
            yield "a line break after the prompt", lambda ids: (*ids, newline[0])
    yield "the prompt without its first token", lambda ids: ids[1:] or ids
    yield "the prompt without its last token", lambda ids: ids[:-1] or ids


def fitted_temperature(few: ModelScores, side: str, transform: Transform = log_probabilities) -> float:
    """The temperature at which the policy's log-probabilities, or a transform, are nearest to a column."""
    column = getattr(few.table, side)

    def distance(log_temperature: float) -> float:
        divisor = math.exp(log_temperature)
        return _size(few.column(lambda logits, rows: transform(logits / divisor, rows)) - column)

    coarse = _minimum(distance, math.log(0.1), math.log(10.0))
    return math.exp(_minimum(distance, coarse - 0.01, coarse + 0.01))


def _temperatures(scores: ModelScores, few: ModelScores, limit: float) -> Iterator[Hypothesis]:
    """Yield hypotheses that both columns are at temperatures of their own; the drawn tokens tell which errs."""
    trainer, engine = (fitted_temperature(few, side) for side in ("trainer", "engine"))
    if abs(math.log(trainer / engine)) < SMALLEST_LOG_RATIO:
        return

    def gaps(of: ModelScores) -> Floats:
        """The log-likelihood of the tokens at the trainer's temperature less that at the engine's."""
        return of.column(at_temperature(trainer)) - of.column(at_temperature(engine))

    if _size(few.table.difference - gaps(few)) < SMALLER * _size(few.table.difference):
        of_tokens = gaps(scores)
        what = f"temperature {trainer * scores.temperature:.4g} for the trainer and {engine * scores.temperature:.4g}"
        for cause, penalty in (("temperature", of_tokens.sum()), ("processed", -of_tokens.sum())):
            prediction = Prediction(
                cause, what, lambda scores: scores.policy - of_tokens, 2.0 + max(float(penalty), 0.0)
            )
            yield _predicted(scores, prediction, "engine", limit)


SettingTransform = Callable[[ModelScores, float, float], Transform]
"""From scores, the value of a setting, and a temperature that has divided their logits further, to the transform."""
Setting = tuple[str, str, float, float, Callable[[float], float], SettingTransform]
"""A setting of sampling: its cause and words, the bounds of a strength, its value at a strength, and the transform."""


def _cut(name: str) -> SettingTransform:
    """A cut by "top_p", "top_k" or "min_p": what the tokens that it keeps gain, which those outside are given too."""

    def renormalised(scores: ModelScores, value: float, logits: Tensor, rows: np.ndarray) -> Tensor:
        logp, limits = logits.log_softmax(-1), cast("dict[str, Any]", {name: value})
        return logp - truncate(
            logp, order=None if scores.order is None else scores.order[rows[0] : rows[-1] + 1], **limits
        ).log_kept_mass.unsqueeze(-1)

    return lambda scores, value, _: partial(renormalised, scores, value)


def _penalty(name: str, *, with_prompt: bool = False) -> SettingTransform:
    """A penalty of the tokens that stand before each token: "repetition", "presence" or "frequency".

    Engines take it off the logits before a temperature divides them.
    """

    def penalised(
        scores: ModelScores, size: float, divisor: float, logits: Tensor, rows: np.ndarray
    ) -> Tensor:
        before = scores.counts(rows, with_prompt=with_prompt).to(logits.device)
        if name == "repetition":
            changed = torch.where(logits > 0, logits / size, logits * size)
        else:
            changed = logits - size / divisor * (before if name == "frequency" else 1.0)
        return torch.where(before > 0, changed, logits).log_softmax(-1)

    return lambda scores, size, temperature: partial(
        penalised, scores, size, scores.temperature * temperature
    )


SETTINGS: tuple[Setting, ...] = (
    ("truncation", "top_p {:.4g}", math.log(1e-4), math.log(0.9), lambda x: 1 - math.exp(x), _cut("top_p")),
    ("truncation", "top_k {:.0f}", 0, math.log(5000), lambda x: round(math.exp(x)), _cut("top_k")),
    ("truncation", "min_p {:.4g}", math.log(1e-5), math.log(0.9), math.exp, _cut("min_p")),
    (
        "penalty",
        "a repetition penalty of {:.3g} on tokens of prompt and response",
        *(0.7, 2.5, float, _penalty("repetition", with_prompt=True)),
    ),
    (
        "penalty",
        "a repetition penalty of {:.3g} on tokens of the response",
        *(0.7, 2.5, float, _penalty("repetition")),
    ),
    ("penalty", "a presence penalty of {:.3g}", -2.0, 2.0, float, _penalty("presence")),
    ("penalty", "a frequency penalty of {:.3g}", -2.0, 2.0, float, _penalty("frequency")),
)
"""The settings that are tried. The larger a strength, the larger all differences that it makes, or the smaller."""


def _fits(few: ModelScores, side: str, limit: float) -> Iterator[Prediction]:
    """Yield hypotheses that a column is cut or penalised, each setting with the strength that fits best.

    Where a temperature explains a part of the differences, the best setting at it as well, both fitted in turn.
    """

    def at(setting: Setting, strength: float, temperature: float = 1.0) -> Prediction:
        cause, words, _, _, value_at, transform_at = setting
        value = value_at(strength)
        what = words.format(value)
        if temperature != 1:
            what += f" at temperature {temperature * few.temperature:.3g}"

        def column(scores: ModelScores) -> Floats:
            transform = transform_at(scores, value, temperature)
            return scores.column(lambda logits, rows: transform(logits / temperature, rows))

        return Prediction(cause, what, column, 2.0 if temperature == 1 else 4.0)

    def left(column: Floats) -> float:
        """The size of the differences that a column leaves unexplained."""
        return _size(_rest(few, column, side))

    def strength(setting: Setting, temperature: float = 1.0) -> float:
        """The strength of a setting, within its limits, that leaves the least unexplained."""
        return _minimum(lambda x: left(at(setting, x, temperature).column(few)), *setting[2:4])

    difference = few.table.difference
    visible = difference[np.abs(difference) > 0.01 * np.abs(difference).max()]
    # A cut alone makes differences of one sign.
    is_cut = ((visible < 0) == (side == "engine")).sum() > NEARLY_ALL * len(visible)
    for setting in SETTINGS if is_cut else SETTINGS[3:]:
        yield at(setting, strength(setting))
    temperature = fitted_temperature(few, side)
    if (
        limit * few.table.unit.mean()
        < left(few.column(at_temperature(temperature)))
        < SMALLER * _size(difference)
    ):
        fits = ((setting, strength(setting, temperature)) for setting in SETTINGS)
        setting, best = min(fits, key=lambda fit: left(at(*fit, temperature).column(few)))
        for _ in range(ALTERNATIONS):
            temperature = fitted_temperature(few, side, setting[5](few, setting[4](best), temperature))
            best = strength(setting, temperature)
        yield at(setting, best, temperature)


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function with one minimum, by golden sections."""
    inside = low + (math.sqrt(5) - 1) / 2 * (high - low)
    best = (inside, function(inside))
    for _ in range(SEARCH_STEPS):
        mirrored = low + high - best[0]
        left, right = sorted([best, (mirrored, function(mirrored))])
        if left[1] < right[1]:
            high, best = right[0], left
        else:
            low, best = left[0], right
    return best[0]


def _modules(few: ModelScores, side: str) -> Iterator[Prediction]:
    """Yield hypotheses that one side has the policy's weights in some modules and the reference's in the others.

    A regression on the changes by each kind of module shows which kinds differ; if kinds differ in part, they are split
    into their modules.
    """
    policy, reference = few.pair.policy, few.pair.reference
    try:
        groups = [group for group in weight_groups(policy, reference, "modules") if not group.is_identical]
    except KleashError:  # one network with an adapter, or two of other architectures or dtypes
        return
    target = few.table.difference if side == "engine" else -few.table.difference

    def of(chosen: Sequence[WeightGroup], scores: ModelScores) -> Floats:
        with swapped_weights(policy, reference, chosen) as mixed:
            return scores.with_model(mixed)

    def shares(groups: Sequence[WeightGroup]) -> Floats:
        """The share of each group's change that the differences have; where changes are large, they do not add up."""
        moved = np.stack([few.policy - of([group], few) for group in groups], axis=1)
        size = np.hypot(np.linalg.norm(moved, axis=1), SMALL_CHANGE)
        return np.linalg.lstsq(moved / size[:, None], target / size, rcond=None)[0]

    def left(chosen: Sequence[WeightGroup]) -> float:
        return _size(_rest(few, of(chosen, few), side))

    of_kinds = shares(groups)
    parts = list[WeightGroup]()
    for group, share in zip(groups, of_kinds, strict=True):
        is_split = share > PARTIAL and bool((np.abs(of_kinds - 0.5) < 0.5 - PARTIAL).any())
        split = [replace(group, name=path, parts=(path,)) for path in group.parts]
        parts += split if is_split else [group]
    of_parts = shares(parts)
    chosen = [group for group, share in zip(parts, of_parts, strict=True) if share > 0.5]
    best = left(chosen)
    for group in (parts[index] for index in np.flatnonzero(np.abs(of_parts - 0.5) < UNCLEAR)):
        other = [each for each in parts if (each in chosen) != (each is group)]
        if (of_other := left(other)) < best:
            chosen, best = other, of_other
    if 0 < len(chosen) < len(parts):
        names = [group.name for group in chosen[:MOST_NAMED]] + ["others"] * (len(chosen) > MOST_NAMED)
        yield Prediction(
            "modules",
            f"the reference's weights in {', '.join(names)}",
            partial(of, chosen),
            1.0 + len(parts) * math.log(2),
        )


def reference_hypotheses(scores: ModelScores, limit: float) -> Iterator[Hypothesis]:
    """Hypotheses about the reference's column, the healthy one last; none without such a column.

    A healthy column equals the reference's own log-probabilities at temperature 1 or that of the trainer's, up to what
    rounding explains. Where the errors of the other columns are small, up to half of it: the reference may run in
    another dtype than the policy.

    Args:
        scores: of the models.
        limit: the largest error of logits that rounding explains, in nats.
    """
    table, column = scores.table, scores.table.reference
    if column is None:
        return
    of_policy = (table.difference, table.trainer - scores.policy)
    seen = max(float(np.linalg.norm(errors)) for errors in of_policy) / float(np.linalg.norm(table.unit))
    limit = min(limit, max(limit / DISTINCT, DISTINCT * seen))
    plain = replace(scores, temperature=1.0)
    rests = [(column - each.reference, token_unit(each.reference)) for each in (scores, plain)]
    rest, unit = min(rests, key=lambda pair: _size(pair[0]))
    away = f"the column differs from the reference's own scores by {np.median(np.abs(rest)):.2g} nats in the median"
    for cause, evidence, residual, family in (
        (
            "reference",
            f"{away}, and equals the policy's: adapters were not disabled",
            column - scores.policy,
            rounding(limit),
        ),
        ("reference", away, rest, most(max(SMALLEST_DIFFERENCE, DISTINCT * limit))),
        (HEALTHY, "", rest, rounding(limit)),
    ):
        yield Hypothesis(cause=cause, evidence=evidence, residual=residual, family=family, unit=unit)


def common_temperature(scores: ModelScores) -> ModelScores:
    """The scores at the temperature of the trainer's column, which is perhaps also that of the engine's."""
    few = scores.few()
    temperature = fitted_temperature(few, "trainer")
    away = (few.column(at_temperature(value)) - few.table.trainer for value in (temperature, 1.0))
    return (
        replace(scores, temperature=temperature)
        if _size(next(away)) < SMALLER * _size(next(away))
        else scores
    )


def _weights(scores: ModelScores, limit: float) -> Hypothesis:
    """The hypothesis that one side has other weights, which move the distributions in a way that repeats itself."""
    table = scores.table
    rest = table.difference - _systematic(scores)
    before, after = (float(np.median(np.abs(each))) for each in (table.difference, rest))
    return Hypothesis(
        cause="weights",
        evidence=f"the differences repeat themselves in other responses, as those of other weights do: what other "
        f"responses predict makes {before:.2g} nats in the median {after:.2g}",
        residual=rest,
        family=everywhere(limit / math.sqrt(DISTINCT)),
        unit=table.unit,
        penalty=4.0,
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
    features = (scores.policy - scores.reference)[:, None]
    if weight is not None:
        draw = torch.Generator().manual_seed(0)
        projected = weight.float().cpu() @ torch.randn(weight.shape[1], PROJECTED, generator=draw)
        moved = [
            projected[torch.from_numpy(table.token_id[rows])] - logits.softmax(-1).cpu() @ projected
            for logits, rows in scores.blocks()
        ]
        features = np.concatenate([features, torch.cat(moved).double().numpy() / PROJECTED**0.5], axis=1)
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


UNCERTAIN_LOGP = -1.0
"""The policy's log-probability below which a token was not certain, so that one of 0 in both columns is none."""
LEAST_UNFILLED_SHARE = 0.01
"""Share of such tokens from which they are a finding."""
SAMPLER_PRIOR_NATS = 9.0
"""Log of the prior odds against another sampler; a deviation of z standard errors is z^2 / 2 nats for it."""


def unfilled_tokens(scores: ModelScores) -> list[LikelyCause]:
    """The finding that tokens count at which both columns are 0, as at results of tools; none if there are few.

    Tokens of which the policy is certain, too, are none of these.
    """
    lower = np.minimum(scores.table.trainer, scores.table.engine)
    is_unfilled = (lower == 0) & scores.table.placeholder_runs(lower) & (scores.policy < UNCERTAIN_LOGP)
    what = (
        f"both columns are 0 at {is_unfilled.sum():,} tokens, in runs, and the policy is not certain of them"
    )
    return [likely_cause("mask", what)] if is_unfilled.mean() > LEAST_UNFILLED_SHARE else []


def other_sampler(scores: ModelScores, limit: float) -> list[LikelyCause]:
    """The finding that the tokens were drawn by another sampler; none if they were not, or it cannot be seen.

    Under the columns' distribution, which is the policy's at the temperature of the scores, the sum of log p + entropy
    over the tokens has mean 0 and a known variance, and so has the number of tokens that stand before.
    """
    table = scores.table
    is_uncertain = table.unit > 1e-3
    away = (np.abs(scores.policy - table.engine) / table.unit.clip(1e-3))[is_uncertain]
    if float(np.median(away)) > limit + 1e-4:
        return []
    moments: list[np.ndarray] = []
    for logits, rows in scores.blocks():
        logp = logits.log_softmax(-1).double()
        p, finite = logp.exp(), logp.clamp(min=-745)
        seen = (scores.counts(rows, with_prompt=True) > 0).to(p.device)
        mean, square, share = (p * finite).sum(-1), (p * finite**2).sum(-1), (p * seen).sum(-1)
        ids = torch.from_numpy(table.token_id[rows]).to(p.device).unsqueeze(-1)
        drawn, is_seen = finite.gather(-1, ids).squeeze(-1), seen.double().gather(-1, ids).squeeze(-1)
        columns = (drawn - mean, is_seen - share, square - mean**2, share * (1 - share))
        moments.append(torch.stack(columns, dim=-1).cpu().numpy())
    gaps, variances = np.split(np.concatenate(moments).sum(axis=0), 2)
    errors = gaps / np.sqrt(np.where(variances > 0, variances, np.inf))
    probability = 1 / (1 + math.exp(min(700.0, SAMPLER_PRIOR_NATS - float((errors**2).max()) / 2)))
    evidence = (
        f"the sum of the drawn tokens' log-probabilities is {gaps[0]:+.3g} nats from its expectation ({errors[0]:+.1f} "
        f"standard errors), and the number of tokens that stand before {gaps[1]:+.3g} ({errors[1]:+.1f})"
    )
    return [] if probability < 0.5 else [likely_cause("sampler", evidence, probability)]
