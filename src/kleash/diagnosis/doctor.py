"""The doctor: ranks the causes of a mismatch by how well each explains the columns of log-probabilities."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kleash.diagnosis.causes import CAUSES, HEALTHY
from kleash.diagnosis.column_hypotheses import column_hypotheses
from kleash.diagnosis.hypotheses import hypotheses_without_models
from kleash.diagnosis.hypothesis import Hypothesis
from kleash.diagnosis.model_hypotheses import hypotheses_with_models
from kleash.diagnosis.model_scores import ModelScores
from kleash.diagnosis.noise_models import healthy_scale
from kleash.diagnosis.part_of_responses import hypotheses_about_some_responses
from kleash.diagnosis.reference_column import reference_hypotheses
from kleash.diagnosis.rollout_files import note_on_one_sided_files, read_rollout_files
from kleash.diagnosis.rollout_records import LOG_OF_ZERO, ROUNDING_NATS, RolloutRecord
from kleash.diagnosis.token_table import TokenTable, sample_rollouts, short_dtype, tabulate
from kleash.jobs.rollout_jobs import DoctorJob
from kleash.models import Pair
from kleash.models.checkpoints.file_hashes import require_unchanged_files, watching_files
from kleash.models.pair_loading import load_pair_with
from kleash.store import Diagnosis
from kleash.store.likely_causes import LikelyCause
from kleash.version import __version__

RESAMPLES = 200
SMALLEST_PROBABILITY = 0.01
"""Causes below it are not listed."""
MIN_TOKENS, MOST_TOKENS = 50, 100_000
"""Fewer tokens than the first are not diagnosed; of more than the second, a sample is."""


def diagnose(
    rollouts: Sequence[RolloutRecord],
    *,
    pair: Pair | None = None,
    rounding: str = "bfloat16",
    file: str = "",
    batch_tokens: int = 4096,
) -> Diagnosis:
    """Rank the likely causes of a mismatch between trainer and engine.

    Each cause is a likelihood of the differences of the two columns; with the models, many are a prediction of the
    differences, scored again under the hypothesis, that leaves only rounding. The probability of a cause is the share
    of resamples of the responses in which it has the largest likelihood, with a penalty for fitted parameters. A
    healthy engine, whose differences rounding explains, is one of the hypotheses: if it is the likeliest, there are
    no findings.

    Args:
        rollouts: with trainer's and engine's log-probabilities, and perhaps the reference's. Of more than 100 000
            tokens, a sample is examined, and a note says so.
        pair: policy and reference, to score the same tokens again; None without the models.
        rounding: dtype of the networks of trainer and engine, the coarser of the two: the size of healthy rounding.
        file: its name, for the record.
        batch_tokens: largest number of tokens in a batch of the models.

    Raises:
        ModelError, NonFiniteError: if a model cannot score the tokens.
    """
    largest_scale = healthy_scale(rounding)
    tokens = sum(int(rollout.is_counted.sum()) for rollout in rollouts)
    examined = sample_rollouts(rollouts, MOST_TOKENS)
    table = tabulate(examined)
    notes: list[str] = []
    findings: list[LikelyCause] = []
    if len(table.trainer) < tokens:
        notes.append(
            f"{len(table.trainer):,} of {tokens:,} tokens were examined, a random sample in {len(examined):,} of "
            f"{len(rollouts):,} responses"
        )
    if tokens < MIN_TOKENS:
        notes.append(f"{tokens} tokens are too few for a diagnosis; give {MIN_TOKENS} or more")
    else:
        hypotheses = hypotheses_without_models(table, largest_scale)
        hypotheses += column_hypotheses(table, largest_scale)
        hypotheses += hypotheses_about_some_responses(table, largest_scale)
        scores = None
        if pair is not None:
            scores = ModelScores.of(pair, examined, table, batch_tokens)
            hypotheses += hypotheses_with_models(scores, hypotheses, largest_scale)
            hypotheses = [hypothesis for hypothesis in hypotheses if not hypothesis.is_superseded]
        findings += _ranked(hypotheses, has_models=pair is not None)
        findings += _ranked(reference_hypotheses(table, scores, largest_scale), has_models=pair is not None)
        findings.sort(key=lambda finding: -finding.probability)
        findings = _with_short_column(findings, table)
        notes += _impossible_values(table)
        zeros = int(np.sum(table.trainer <= LOG_OF_ZERO))
        if zeros:
            notes.append(f"the trainer gives a probability of 0 to {zeros} tokens that the engine drew")
        if table.decimals_error:
            notes.append(
                "the log-probabilities are written with few decimals, so differences of about "
                f"{table.decimals_error:.1g} nats are not examined; write at least 6"
            )
        elif table.rounding_error.any() and not _short_side(table):
            notes.append(
                "the log-probabilities of both sides are 16-bit numbers, so differences of about "
                f"{float(np.mean(table.rounding_error)):.1g} nats are not examined; keep them in float32"
            )
        if table.reference is None:
            notes.append("not every rollout has log-probabilities of a reference, so they were not examined")
        elif pair is None:
            notes.append("without the models, a reference of the wrong weights cannot be seen")
    return Diagnosis(
        kleash=__version__,
        file=file,
        tokens=tokens,
        sequences=len(rollouts),
        examined=tokens >= MIN_TOKENS,
        models=() if pair is None else (pair.policy.path, pair.reference.path),
        findings=tuple(findings),
        notes=tuple(notes),
    )


@watching_files()
def diagnose_file(job: DoctorJob) -> Diagnosis:
    """Run a job: read its files, load the models if there are any, and diagnose.

    Raises:
        SourceError: if a file cannot be read, no token counts, or the models cannot read a rollout.
        ModelError, CannotRunError, MissingExtraError: if a model cannot be loaded.
        ChangedInputError: if a file of the rollouts or a model is written to meanwhile.
    """
    read = read_rollout_files(job.rollouts, allow_logits=True, limit=job.limit)
    pair = None
    if job.policy is not None and job.reference is not None:
        pair = load_pair_with(job.policy, job.reference, job)
    diagnosis = diagnose(
        read.rollouts, pair=pair, rounding=job.rounding, file=read.name, batch_tokens=job.batch_tokens
    )
    one_sided = note_on_one_sided_files(read.kl_by_file()) if diagnosis.examined else ()
    require_unchanged_files()
    return replace(diagnosis, files=read.sizes, notes=(*one_sided, *read.notes, *diagnosis.notes))


def _short_side(table: TokenTable) -> tuple[str, str] | None:
    """The side whose log-probabilities are 16-bit numbers where those of the other side are not, and their type."""
    trainer, engine = short_dtype(table.trainer), short_dtype(table.engine)
    if (trainer is None) == (engine is None):
        return None
    return ("trainer", trainer) if trainer is not None else ("engine", str(engine))


def _with_short_column(findings: Sequence[LikelyCause], table: TokenTable) -> list[LikelyCause]:
    """Findings with "precision" for a side whose log-probabilities are 16-bit numbers.

    All hypotheses allow for that rounding, so it comes after the causes of the other differences, if there are any.
    """
    short_side = _short_side(table)
    if short_side is None:
        return list(findings)
    side, dtype = short_side
    evidence = f"all log-probabilities of the {side} are {dtype} numbers, those of the other side are not"
    named = [finding for finding in findings if finding.cause == "precision"]
    if named:
        evidence = f"{evidence}; {named[0].evidence}"
    precision = LikelyCause(
        cause="precision",
        meaning=CAUSES["precision"].meaning,
        probability=1.0,
        evidence=evidence,
        next_test=CAUSES["precision"].next_test,
    )
    if named:
        return [precision if finding.cause == "precision" else finding for finding in findings]
    return [*findings, precision]


def _impossible_values(table: TokenTable) -> list[str]:
    """A note for each column with values above 0, which log-probabilities are not."""
    columns = {"trainer": table.trainer, "engine": table.engine}
    counts = {name: int(np.sum(column > ROUNDING_NATS)) for name, column in columns.items()}
    return [
        f"{count} of the {name}'s {len(table.trainer)} values are above 0, which log-probabilities are not"
        for name, count in counts.items()
        if count
    ]


def _ranked(hypotheses: Sequence[Hypothesis], *, has_models: bool) -> list[LikelyCause]:
    """The causes among hypotheses by probability; none if the healthy hypothesis is the likeliest."""
    if not hypotheses:
        return []
    probabilities = _probabilities(hypotheses)
    by_cause: dict[str, float] = {}
    for hypothesis, probability in zip(hypotheses, probabilities, strict=True):
        for cause in _causes(hypothesis):
            by_cause[cause] = by_cause.get(cause, 0.0) + probability
    if max(by_cause, key=lambda cause: by_cause[cause]) == HEALTHY:
        return []
    findings: list[LikelyCause] = []
    grouped: set[str] = set()
    for cause in sorted(by_cause, key=lambda cause: -by_cause[cause]):
        if cause == HEALTHY or cause in grouped:
            continue
        best = max((h for h in hypotheses if cause in _causes(h)), key=lambda h: h.score)
        alike = () if has_models or best.is_unmistakable else CAUSES[cause].alike
        alike = tuple(name for name in alike if name not in grouped)
        probability = by_cause[cause] + sum(by_cause.get(name, 0.0) for name in alike)
        grouped |= {cause, *alike}
        if probability >= SMALLEST_PROBABILITY:
            findings.append(
                LikelyCause(
                    cause=cause,
                    meaning=CAUSES[cause].meaning,
                    probability=float(min(1.0, probability)),
                    evidence=best.evidence,
                    next_test=CAUSES[cause].next_test,
                    alike=alike,
                )
            )
    return findings


def _causes(hypothesis: Hypothesis) -> tuple[str, ...]:
    """The one or two causes of a hypothesis."""
    return tuple(cause for cause in (hypothesis.cause, hypothesis.second_cause) if cause is not None)


def _probabilities(hypotheses: Sequence[Hypothesis]) -> np.ndarray:
    """The share of resamples of the responses in which each hypothesis has the largest score."""
    log_likelihoods = np.stack([hypothesis.log_likelihood for hypothesis in hypotheses])
    penalties = np.array([hypothesis.penalty for hypothesis in hypotheses])
    count = log_likelihoods.shape[1]
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    winners = (draws @ log_likelihoods.T - penalties).argmax(axis=1)
    return np.bincount(winners, minlength=len(hypotheses)) / RESAMPLES
