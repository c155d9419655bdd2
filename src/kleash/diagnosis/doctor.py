"""The doctor: ranks the causes of a mismatch by how well each predicts the columns on held-out responses."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kleash.diagnosis.causes import CAUSES, HEALTHY, UNEXPLAINED
from kleash.diagnosis.column_hypotheses import (
    break_hypotheses,
    noise_hypotheses,
    prediction_hypotheses,
    temperature_hypotheses,
    unexplained,
)
from kleash.diagnosis.column_values import evidence_of_values, padding
from kleash.diagnosis.hypothesis import Hypothesis, probabilities
from kleash.diagnosis.model_hypotheses import model_hypotheses, wrong_side
from kleash.diagnosis.model_scores import ModelScores
from kleash.diagnosis.reference_column import reference_hypotheses
from kleash.diagnosis.residuals import DISTINCT, healthy_scale
from kleash.diagnosis.rollout_files import note_on_one_sided_files, read_rollout_files
from kleash.diagnosis.rollout_records import LOG_OF_ZERO, ROUNDING_NATS, RolloutRecord
from kleash.diagnosis.sampler import sampler_evidence
from kleash.diagnosis.token_table import TokenTable, sample_rollouts, short_dtype, tabulate
from kleash.jobs.rollout_jobs import DoctorJob
from kleash.models import Pair
from kleash.models.checkpoints.file_hashes import require_unchanged_files, watching_files
from kleash.models.pair_loading import load_pair_with
from kleash.store import Diagnosis
from kleash.store.likely_causes import LikelyCause
from kleash.version import __version__

SMALLEST_PROBABILITY = 0.01
"""Causes below it are not listed."""
CERTAIN = 0.98
"""Probability of a cause that the values themselves show, and of any cause at most."""
LARGEST_HEALTHY = 0.2
"""Probability of a healthy engine from which there is no finding."""
MIN_TOKENS, MOST_TOKENS, MOST_WITH_MODELS = 50, 100_000, 25_000
"""Fewer tokens than the first are not diagnosed; of more than the second, or the third with models, a sample is."""
FAULTY_SHARE, SOUND_SHARE, LARGEST_UNCLEAR = 0.25, 0.08, 0.1
"""Share of a response's tokens that differ by more than rounding: above the first it has a fault, up to the second it
has none; the last is the share of responses between the two with which the fault is in all of them."""


def diagnose(
    rollouts: Sequence[RolloutRecord],
    *,
    pair: Pair | None = None,
    rounding: str = "bfloat16",
    file: str = "",
    batch_tokens: int = 4096,
) -> Diagnosis:
    """Rank the likely causes of a mismatch between trainer and engine.

    Each cause predicts the differences of the two columns, and one mixture of scales is the model of what it leaves.
    The probability of a cause comes from its likelihood on responses that its mixture was not fitted to, against all
    other causes, rounding, and differences of any size and sign that no cause explains ("unexplained"). If rounding
    explains them, there are no findings.

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
    limit = healthy_scale(rounding)
    tokens = sum(int(rollout.is_counted.sum()) for rollout in rollouts)
    examined = sample_rollouts(rollouts, MOST_TOKENS if pair is None else MOST_WITH_MODELS)
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
        padded = padding(table)
        if padded.any():
            findings.append(_padding_finding(table, padded))
            examined = [
                replace(each, is_counted=_without(each.is_counted, padded[table.sequence == number]))
                for number, each in enumerate(examined)
            ]
            table = tabulate(examined)
        findings += _findings(examined, table, pair, limit, batch_tokens)
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
        if pair is None:
            notes.append(
                "without the models, it cannot be seen whether the tokens were drawn from these distributions"
            )
        if table.reference is None:
            notes.append("not every rollout has log-probabilities of a reference, so they were not examined")
        elif pair is None:
            equal = ", and it equals the trainer's column, right only before the first update"
            is_equal = np.array_equal(table.reference, table.trainer)
            notes.append(
                f"without the models, a reference of the wrong weights cannot be seen{equal if is_equal else ''}"
            )
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
    precision = _finding("precision", CERTAIN, evidence)
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


def _padding_finding(table: TokenTable, padded: np.ndarray) -> LikelyCause:
    """The finding that responses end with padding that counts."""
    ended = len(np.unique(table.sequence[padded]))
    return _finding(
        "mask",
        CERTAIN,
        f"{ended} of {table.num_sequences} responses end with one token, {padded.sum():,} times in all, at which both "
        f"columns have one value ({table.trainer[padded][0]:g} and {table.engine[padded][0]:g}): padding",
    )


def _without(is_counted: np.ndarray, is_padding: np.ndarray) -> np.ndarray:
    """A mask without the tokens, among those that count, that are padding."""
    mask = is_counted.copy()
    mask[np.flatnonzero(is_counted)[is_padding]] = False
    return mask


def _finding(cause: str, probability: float, evidence: str, alike: tuple[str, ...] = ()) -> LikelyCause:
    """A finding with the words of its cause."""
    known = CAUSES[cause]
    return LikelyCause(
        cause=cause,
        meaning=known.meaning,
        probability=min(CERTAIN, float(probability)),
        evidence=evidence,
        next_test=known.next_test,
        alike=alike,
    )


def _findings(
    rollouts: Sequence[RolloutRecord], table: TokenTable, pair: Pair | None, limit: float, batch_tokens: int
) -> list[LikelyCause]:
    """The findings about the columns of trainer and engine, the sampler, and the reference's column."""
    shown = evidence_of_values(table)
    if shown is not None:
        return [_finding(shown.cause, CERTAIN, shown.evidence, shown.alike)]
    is_faulty = _faulty_responses(table, limit)
    prefix, part = "", table
    if is_faulty is not None:
        prefix = f"in {is_faulty.sum()} of {table.num_sequences} responses, the others are healthy: "
        numbers = np.unique(table.sequence)[is_faulty]
        part = table.selected(np.isin(table.sequence, numbers))
    scores = None if pair is None else ModelScores.of(pair, rollouts, table, batch_tokens)
    of_part = scores
    if pair is not None and is_faulty is not None:
        faulty = [rollouts[number] for number in np.unique(part.sequence)]
        part = tabulate(faulty)
        of_part = ModelScores.of(pair, faulty, part, batch_tokens)
    hypotheses = list(_hypotheses(part, of_part, limit))
    findings = _ranked(part, hypotheses, has_models=pair is not None, prefix=prefix)
    if scores is not None and not findings:
        sampler = sampler_evidence(scores, limit)
        if sampler is not None and sampler.probability > 0.5:
            findings.append(_finding("sampler", sampler.probability, sampler.evidence))
    of_reference = list(reference_hypotheses(table, scores, limit))
    return findings + _ranked(table, of_reference, has_models=pair is not None)


def _faulty_responses(table: TokenTable, limit: float) -> np.ndarray | None:
    """Which responses differ by more than rounding at many tokens, where the others do at few; None if all are alike."""
    is_large = np.abs(table.difference) > DISTINCT * np.hypot(limit * table.unit, table.rounding_error + 1e-5)
    numbers = np.unique(table.sequence, return_inverse=True)[1]
    share = np.bincount(numbers, weights=is_large) / np.bincount(numbers)
    is_faulty = share > FAULTY_SHARE
    unclear = int(np.sum((share > SOUND_SHARE) & ~is_faulty))
    if min(is_faulty.sum(), (~is_faulty).sum()) < 2 or unclear > LARGEST_UNCLEAR * len(share):
        return None
    return is_faulty


def _hypotheses(table: TokenTable, scores: ModelScores | None, limit: float) -> Iterator[Hypothesis]:
    """All hypotheses, the free one last. Those of the models stand for what the columns alone can only resemble."""
    side = None if scores is None else wrong_side(scores)
    for hypothesis in (*noise_hypotheses(table, limit), *break_hypotheses(table, limit)):
        if not (side == "trainer" and hypothesis.cause == "weights"):
            yield hypothesis
    for hypothesis in prediction_hypotheses(table, limit):
        if scores is None or hypothesis.cause not in ("truncation", "penalty"):
            yield hypothesis
    yield from temperature_hypotheses(table, limit) if scores is None else model_hypotheses(scores, limit)
    yield from unexplained(table)


def _ranked(
    table: TokenTable, hypotheses: Sequence[Hypothesis], *, has_models: bool, prefix: str = ""
) -> list[LikelyCause]:
    """The causes among hypotheses by probability; none if rounding explains the columns."""
    if not hypotheses:
        return []
    shares = probabilities(table, hypotheses)
    by_cause: dict[str, float] = {}
    for hypothesis, share in zip(hypotheses, shares, strict=True):
        for cause in hypothesis.causes:
            by_cause[cause] = by_cause.get(cause, 0.0) + float(share)
    if by_cause.get(HEALTHY, 0.0) > LARGEST_HEALTHY:
        return []
    findings: list[LikelyCause] = []
    grouped: set[str] = {HEALTHY}
    for cause in sorted(by_cause, key=lambda cause: -by_cause[cause]):
        if cause in grouped:
            continue
        best = max(
            zip(hypotheses, shares, strict=True),
            key=lambda pair: pair[1] if cause in pair[0].causes else -1.0,
        )[0]
        alike = best.alike if best.alike is not None else () if has_models else CAUSES[cause].alike
        alike = tuple(name for name in alike if name not in grouped)
        probability = by_cause[cause] + sum(by_cause.get(name, 0.0) for name in alike)
        grouped |= {cause, *alike}
        if probability >= SMALLEST_PROBABILITY:
            findings.append(_finding(cause, probability, prefix + best.evidence, alike))
    return findings
