"""Hypotheses that score the same tokens again with the models, and see whether the differences vanish."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from kleash.diagnosis.causes import HEALTHY
from kleash.diagnosis.hypothesis import DISTINCT, SMALLEST_DIFFERENCE, Hypothesis, from_fit
from kleash.diagnosis.model_scores import ModelScores, Settings, log_kept_mass
from kleash.diagnosis.noise_models import Floats, Residuals, other_model, rounding
from kleash.diagnosis.rollout_records import LOG_OF_ZERO
from kleash.diagnosis.token_table import SHORT_DTYPES

LOG_TEMPERATURES = (math.log(0.1), math.log(10.0))
TEMPERATURE_STEPS = 24
SMALLEST_LOG_RATIO = 0.01
"""Temperatures whose logarithms differ by less are equal."""
FITTED_SEQUENCES = 8
"""Responses on which changed prompts are tried, before all are scored after the best."""
TRUNCATIONS: tuple[Settings, ...] = (
    *({"top_p": p} for p in (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)),
    *({"top_k": k} for k in (1, 5, 10, 20, 30, 40, 50, 64, 100, 200)),
    *({"min_p": m} for m in (0.01, 0.02, 0.05, 0.1, 0.2)),
    *({"top_k": k, "top_p": p} for k in (20, 50) for p in (0.8, 0.9, 0.95)),
)
"""Settings of truncated sampling that are tried."""
LARGEST_KEPT_MASS = 0.999
"""Mass that a cut keeps on average, above which a temperature alone explains the columns."""
CUT_SAMPLE = 64
"""Tokens to which a temperature with a truncation is fitted."""
LARGEST_COUNTED = 5.0
"""Nats above which a difference counts as this much in such a fit: a token just outside the cut has any difference."""
ONE_SIDED = 0.9
"""Share of the larger differences that a truncation makes of one sign."""


def hypotheses_with_models(
    scores: ModelScores, without_models: Sequence[Hypothesis], largest_scale: float
) -> list[Hypothesis]:
    """The hypotheses that predict the differences by scoring the tokens again.

    Args:
        scores: of the models.
        without_models: the hypotheses that need none. Where a healthy one explains the columns best, only the
            precision of logits is examined, whose errors are of the size of rounding.
        largest_scale: the largest error of logits that rounding explains, in nats.
    """
    hypotheses = [*_precision(scores, largest_scale)]
    likeliest = max(without_models, key=lambda hypothesis: hypothesis.score)
    if likeliest.cause == HEALTHY:
        return hypotheses
    hypotheses += _temperatures(scores, largest_scale)
    hypotheses += _cut_at_a_temperature(scores, largest_scale)
    hypotheses += _raw_logits(scores, largest_scale)
    hypotheses += _truncations(scores, largest_scale)
    hypotheses += _contexts(scores, largest_scale)
    hypotheses += _weights(scores, largest_scale)
    return hypotheses


def _predicted(
    scores: ModelScores, cause: str, prediction: Floats, largest_scale: float, what: str, parameters: int
) -> Hypothesis:
    """The hypothesis that the differences are a prediction up to rounding."""
    table = scores.table
    rest = table.difference - np.nan_to_num(prediction, nan=0.0, posinf=-LOG_OF_ZERO, neginf=LOG_OF_ZERO)
    fit = rounding(Residuals(rest, table.unit, table.rounding_error), largest_scale)
    before, after = (float(np.median(np.abs(values))) for values in (table.difference, rest))
    evidence = f"{what}, the differences fall from {before:.2g} to {after:.2g} nats in the median"
    return from_fit(table, cause, fit, evidence, more_parameters=parameters)


def _precision(scores: ModelScores, largest_scale: float) -> Iterator[Hypothesis]:
    """Logits, or the whole softmax, rounded to 16 bits on one side."""
    for name, dtype in SHORT_DTYPES.items():
        rounded_logits = scores.token_logp(
            lambda logits, dtype=dtype: logits.to(dtype).float().log_softmax(-1)
        )
        rounded = torch.from_numpy(rounded_logits).to(dtype).double().numpy()
        for kind, values in (("logits", rounded_logits), ("logits and log-probabilities", rounded)):
            error = values - scores.policy
            for side, prediction in (("engine", -error), ("trainer", error)):
                what = f"with the {side}'s {kind} rounded to {name}"
                yield _predicted(scores, "precision", prediction, largest_scale, what, 2)


def _temperatures(scores: ModelScores, largest_scale: float) -> Iterator[Hypothesis]:
    """Both columns at temperatures of their own; which side is wrong follows from the drawn tokens."""
    table = scores.table
    trainer, engine = (_fitted_temperature(scores, column) for column in (table.trainer, table.engine))
    if abs(math.log(trainer / engine)) < SMALLEST_LOG_RATIO:
        return
    prediction = scores.at_temperature(trainer) - scores.at_temperature(engine)
    what = (
        f"with the trainer at temperature {trainer:.3g} and the engine at {engine:.3g} (the tokens were drawn at about "
        f"{_sampling_temperature(scores):.2g})"
    )
    both = _predicted(scores, "temperature", prediction, largest_scale, what, 2)
    # It is also the log-likelihood of the tokens at the trainer's temperature less that at the engine's.
    drawn = table.by_sequence(prediction)
    if drawn.sum() > 0:
        yield replace(both, log_likelihood=both.log_likelihood - drawn)
        yield replace(both, cause="processed")
    else:
        yield both
        yield replace(both, cause="processed", log_likelihood=both.log_likelihood + drawn)


def _cut_at_a_temperature(scores: ModelScores, largest_scale: float) -> Iterator[Hypothesis]:
    """The engine draws at a temperature and cuts what it draws from; the trainer does neither, or divides only."""
    table = scores.table
    trainer = _fitted_temperature(scores, table.trainer)
    sample = scores.sample.every(max(1, len(scores.sample.rows) // CUT_SAMPLE))

    def distances(temperature: float, candidates: Sequence[Settings] = TRUNCATIONS) -> Floats:
        values = sample.at_temperature(temperature) - sample.log_kept_masses(candidates, temperature)
        return np.minimum(np.abs(values - table.engine[sample.rows]), LARGEST_COUNTED).mean(axis=-1)

    start = _fitted_temperature(scores, table.engine)
    temperature = min((start, 1.2 * start, 1.5 * start), key=lambda tried: distances(tried).min())
    settings = TRUNCATIONS[int(distances(temperature).argmin())]
    for _ in range(2):
        low, high = math.log(temperature / 1.5), math.log(temperature * 1.5)
        temperature = math.exp(
            _minimum(lambda log, fixed=settings: distances(math.exp(log), (fixed,)).item(), low, high)
        )
        settings = TRUNCATIONS[int(distances(temperature).argmin())]
    if abs(math.log(trainer / temperature)) < SMALLEST_LOG_RATIO:
        return
    mass = log_kept_mass(scores, settings, None, temperature)
    if float(np.exp(mass).mean()) > LARGEST_KEPT_MASS:
        return
    prediction = scores.at_temperature(trainer) - scores.at_temperature(temperature) + mass
    what = (
        f"with the trainer at temperature {trainer:.3g}, the engine at {temperature:.3g} and cut to "
        f"{_described(settings)}, which keeps {float(np.exp(mass).mean()):.1%} of the mass on average"
    )
    yield replace(
        _predicted(scores, "temperature", prediction, largest_scale, what, 5), second_cause="truncation"
    )


def _described(settings: Settings) -> str:
    """Settings of truncated sampling in words: "top_k 20 and top_p 0.8"."""
    return " and ".join(f"{name} {value:g}" for name, value in settings.items())


def _fitted_temperature(scores: ModelScores, column: Floats) -> float:
    """The temperature at which the policy's log-probabilities are nearest to a column, in mean absolute difference."""
    sample = scores.sample

    def distance(log_temperature: float) -> float:
        return float(np.abs(sample.at_temperature(math.exp(log_temperature)) - column[sample.rows]).mean())

    return math.exp(_minimum(distance, *LOG_TEMPERATURES))


def _sampling_temperature(scores: ModelScores) -> float:
    """The temperature under which the drawn tokens are likeliest."""

    def surprise(log_temperature: float) -> float:
        return -float(scores.sample.at_temperature(math.exp(log_temperature)).mean())

    return math.exp(_minimum(surprise, *LOG_TEMPERATURES))


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function with one minimum, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(TEMPERATURE_STEPS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _raw_logits(scores: ModelScores, largest_scale: float) -> Iterator[Hypothesis]:
    """One side returns logits in place of log-probabilities."""
    logits = scores.token_logp(lambda logits: logits)
    for side, prediction in (("engine", scores.policy - logits), ("trainer", logits - scores.policy)):
        yield _predicted(scores, "processed", prediction, largest_scale, f"with logits of the {side}", 0)


def _truncations(scores: ModelScores, largest_scale: float) -> Iterator[Hypothesis]:
    """One side is truncated and renormalised: it is larger by -log of the mass that it keeps."""
    table, sample = scores.table, scores.sample
    large = table.difference[np.abs(table.difference) > 0.01]
    if not len(large):
        return
    share_below = float(np.mean(large < 0))
    if max(share_below, 1 - share_below) < ONE_SIDED:
        return
    side, sign = ("engine", 1.0) if share_below > 0.5 else ("trainer", -1.0)
    predictions = sign * sample.log_kept_masses(TRUNCATIONS)
    distances = np.abs(predictions - table.difference[sample.rows]).mean(axis=-1)
    settings = TRUNCATIONS[int(distances.argmin())]
    prediction = sign * log_kept_mass(scores, settings)
    kept_mass = float(np.exp(-np.abs(prediction)).mean())
    what = (
        f"with the {side} cut to {_described(settings)}, which keeps {kept_mass:.1%} of the mass on average"
    )
    yield _predicted(scores, "truncation", prediction, largest_scale, what, 2)


def _contexts(scores: ModelScores, largest_scale: float) -> Iterator[Hypothesis]:
    """One side reads a prompt with a special token more or less at its beginning, or a token less at its end."""
    first = {sequence.prompt_ids[0] for sequence in scores.sequences}
    tokenizer = scores.pair.tokenizer
    specials = {
        name: token
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if isinstance(token := getattr(tokenizer, name, None), int)
    }
    changes: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
        f"{name.removesuffix('_token_id').upper()} before the prompt": lambda ids, token=token: (token, *ids)
        for name, token in specials.items()
    }
    if all(len(sequence.prompt_ids) > 1 for sequence in scores.sequences):
        if len(first) == 1:
            changes["the prompt without its first token"] = lambda ids: ids[1:]
        changes["the prompt without its last token"] = lambda ids: ids[:-1]
    newline = tokenizer.encode("\n", add_special_tokens=False) if tokenizer is not None else []
    if len(newline) == 1:
        changes["a line break after the prompt"] = lambda ids: (*ids, newline[0])
    limit = scores.pair.context_length
    if limit is not None and max(sequence.num_input_tokens for sequence in scores.sequences) + 1 > limit:
        changes = {what: change for what, change in changes.items() if "without" in what}
    table, best = scores.table, ("", math.inf, 0.0)
    for what, change in changes.items():
        values = scores.with_prompts(change, FITTED_SEQUENCES)
        gap, difference = scores.policy[: len(values)] - values, table.difference[: len(values)]
        for sign in (1.0, -1.0):
            distance = float(np.abs(difference - sign * gap).mean())
            best = min(best, (what, distance, sign), key=lambda trial: trial[1])
    what, _, sign = best
    if what:
        prediction = sign * (scores.policy - scores.with_prompts(changes[what]))
        side = "engine" if sign > 0 else "trainer"
        yield _predicted(scores, "context", prediction, largest_scale, f"with {what} for the {side}", 2)


def _weights(scores: ModelScores, largest_scale: float) -> Iterator[Hypothesis]:
    """One side has the reference's weights, or weights on the way from the reference to the policy."""
    table = scores.table
    gap = scores.policy - scores.reference
    for side, prediction in (("engine", gap), ("trainer", -gap)):
        what = f"with the reference's weights for the {side}"
        yield _predicted(scores, "weights", prediction, largest_scale, what, 0)
    size, total = float(gap @ gap), float(table.difference @ table.difference)
    if not size or not total:
        return
    part = float(gap @ table.difference) / size
    rest = Residuals(table.difference - part * gap, table.unit, table.rounding_error)
    fit = other_model(rest, max(SMALLEST_DIFFERENCE, DISTINCT * largest_scale))
    removed = 1 - float(rest.values @ rest.values) / total
    yield from_fit(
        table,
        "weights",
        fit,
        f"{removed:.0%} of the squared differences lie along policy minus reference ({part:+.2f} of it)",
        more_parameters=1,
    )
