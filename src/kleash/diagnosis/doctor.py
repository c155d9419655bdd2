"""The doctor: ranks the causes of a mismatch by how well each predicts the columns on held-out responses."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from kleash.arguments import with_parameters_of
from kleash.diagnosis.causes import CAUSES, HEALTHY, likely_cause
from kleash.diagnosis.column_hypotheses import (
    break_hypotheses,
    cause_in_values,
    noise_hypotheses,
    prediction_hypotheses,
    temperature_hypotheses,
    unexplained,
)
from kleash.diagnosis.engine_numbers import note_on_equal_columns
from kleash.diagnosis.hypothesis import Hypothesis, probabilities
from kleash.diagnosis.model_hypotheses import (
    common_temperature,
    model_hypotheses,
    other_sampler,
    reference_hypotheses,
    unfilled_tokens,
    wrong_side,
)
from kleash.diagnosis.model_scores import ModelScores
from kleash.diagnosis.residuals import DISTINCT, SOFTMAX_NATS, healthy_scale
from kleash.diagnosis.rollout_files import note_on_one_sided_files, read_rollout_files
from kleash.diagnosis.rollout_records import LOG_OF_ZERO, RolloutRecord
from kleash.diagnosis.token_table import TokenTable, sample_rollouts, short_dtype, tabulate
from kleash.jobs.options import job_of
from kleash.jobs.reading_jobs import DoctorJob
from kleash.models import Pair, load_pair
from kleash.sources.in_memory import naming_entries, to_jsonl
from kleash.sources.sequences import ROUNDING_NATS, is_padded, padding_length
from kleash.store import Diagnosis
from kleash.store.file_hashes import require_unchanged_files, watching_files
from kleash.store.job_folder import SOURCE
from kleash.store.rollout_results import LikelyCause
from kleash.version import __version__

SMALLEST_PROBABILITY = 0.01
"""Causes below it are not listed."""
LARGEST_HEALTHY = 0.2
"""Probability of a healthy engine from which there is no finding."""
MIN_TOKENS, MOST_TOKENS, MOST_WITH_MODELS = 50, 100_000, 12_000
"""Fewer tokens than the first are not diagnosed; of more than the second, or the third with models, a sample is."""
FAULTY_SHARE, SOUND_SHARE, LARGEST_UNCLEAR = 0.25, 0.08, 0.5
"""Share of a response's tokens that differ by more than rounding: above the first it has a fault, up to the second it
has none; the last is the share of responses between the two with which the fault is in all of them."""


# Many parameters, since they are the fields of a job, in the order of its help; all but one by keyword.
def diagnose_parameters(
    rollouts: str | PurePath | Iterable[Any] | Sized,
    *,
    policy: str | PurePath | None = None,
    reference: str | PurePath | None = None,
    limit: int | None = None,
    rounding: str = "bfloat16",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: str | None = None,
    batch_tokens: int = 4096,
    revision_policy: str | None = None,
    revision_reference: str | None = None,
    trust_remote_code: bool = False,
    json: bool = False,
    format: str | None = None,
    pair: Pair | None = None,
    file: str = "",
) -> None:
    """The parameters of ``diagnose``: the fields of ``DoctorJob``, and of ``diagnose_records``."""


@with_parameters_of(diagnose_parameters)
def diagnose(rollouts: Any, **options: Any) -> Diagnosis:
    """Rank the likely causes of a mismatch between trainer and engine.

    >>> sides = {f"{side}_logprobs": [-1.1, -2.2, -0.4] for side in ("trainer", "engine")}
    >>> row = {"prompt_token_ids": [1], "response_token_ids": [5, 6, 7], **sides}
    >>> kleash.diagnose(20 * [row]).findings  # both sides agree; or a file's name
    ()

    Args:
        rollouts: files, folders or patterns as for ``read_rollouts``, their records in a list, data set or data frame,
            or rollouts that were read.
        options: with files and records the fields of ``DoctorJob``, which ``kleash doctor --help`` describes, such as
            ``policy`` and ``reference``; with rollouts the keyword arguments of ``diagnose_records``.

    Raises:
        SourceError: if a file cannot be read, no token counts, or the models cannot read a rollout.
        ModelError, NonFiniteError, CannotRunError, MissingExtraError: if a model cannot be loaded, or cannot score.
        ChangedInputError: if a file of the rollouts or a model is written to meanwhile.
        UnknownNameError, OptionError: if an option is unknown, or its value is not allowed.
    """
    entries: Any = [rollouts] if isinstance(rollouts, str | PurePath) else rollouts
    kinds = {type(each) for each in entries} if isinstance(entries, Sequence) else set[type]()
    if kinds == {RolloutRecord}:
        return diagnose_records(entries, **options)
    if kinds and all(issubclass(kind, str | PurePath) for kind in kinds):
        return diagnose_file(job_of(DoctorJob, {"rollouts": tuple(map(str, entries)), **options}))
    with TemporaryDirectory() as folder:
        path = Path(folder) / SOURCE
        path.write_bytes(to_jsonl(entries, "rollouts"))
        with naming_entries(path, "rollouts"):
            diagnosis = diagnose_file(job_of(DoctorJob, {"rollouts": (str(path),), **options}))
    return replace(diagnosis, file="rollouts in memory", files={})


def diagnose_records(
    rollouts: Sequence[RolloutRecord],
    *,
    pair: Pair | None = None,
    rounding: str = "bfloat16",
    file: str = "",
    batch_tokens: int = 4096,
) -> Diagnosis:
    """``diagnose`` of rollouts that were read.

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
    counted, findings = _without_padding(rollouts)
    total, tokens = (sum(int(each.is_counted.sum()) for each in those) for those in (counted, rollouts))
    examined = sample_rollouts(counted, MOST_TOKENS if pair is None else MOST_WITH_MODELS)
    table = tabulate(examined)
    notes: list[str] = []
    if len(table.trainer) < total:
        notes.append(
            f"{len(table.trainer):,} of {total:,} tokens were examined, a random sample in {len(examined):,} of "
            f"{len(rollouts):,} responses"
        )
    if total < MIN_TOKENS:
        notes.append(f"{total} tokens are too few for a diagnosis; give {MIN_TOKENS} or more")
    else:
        findings += _findings(examined, table, pair, limit, batch_tokens)
        findings.sort(key=lambda finding: -finding.probability)
        findings = _with_short_column(findings, table)
        notes += _notes(table, has_models=pair is not None)
    return Diagnosis(
        kleash=__version__,
        file=file,
        tokens=tokens,
        sequences=len(rollouts),
        examined=total >= MIN_TOKENS,
        models=() if pair is None else (pair.policy.path, pair.reference.path),
        findings=tuple(findings),
        notes=tuple(notes),
    )


def _notes(table: TokenTable, *, has_models: bool) -> list[str]:
    """What cannot be seen in the columns, and what is odd in them."""
    counts = {side: int(np.sum(getattr(table, side) > ROUNDING_NATS)) for side in ("trainer", "engine")}
    notes = [
        f"{count} of the {name}'s {len(table.trainer)} values are above 0, which log-probabilities are not"
        for name, count in counts.items()
        if count
    ]
    notes += note_on_equal_columns(torch.from_numpy(table.trainer), torch.from_numpy(table.engine))
    if zeros := int(np.sum(table.trainer <= LOG_OF_ZERO)):
        notes.append(f"the trainer gives a probability of 0 to {zeros} tokens that the engine drew")
    if table.rounding_error.any() and not _short_side(table):
        notes.append(
            "the log-probabilities are written with few decimals, or as 16-bit numbers, so differences of about "
            f"{float(np.mean(table.rounding_error)):.1g} nats are not examined; write at least 6 decimals, in float32"
        )
    if not has_models:
        notes.append(
            "without the models, it cannot be seen whether the tokens were drawn from these distributions, or whether "
            "a reference's weights are the right ones"
        )
        if table.reference is not None and np.array_equal(table.reference, table.trainer):
            notes.append("the reference's column equals the trainer's, right only before the first update")
    return notes


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
        pair = load_pair(
            job.policy,
            job.reference,
            revision_policy=job.revision_policy,
            revision_reference=job.revision_reference,
            dtype=job.dtype,
            device=job.device,
            device_map=job.device_map,
            trust_remote_code=job.trust_remote_code,
        )
    diagnosis = diagnose_records(
        read.rollouts, pair=pair, rounding=job.rounding, file=read.name, batch_tokens=job.batch_tokens
    )
    one_sided = note_on_one_sided_files(read.kl_by_file()) if diagnosis.examined else ()
    require_unchanged_files()
    return replace(diagnosis, files=read.sizes, notes=(*one_sided, *read.notes, *diagnosis.notes))


def _short_side(table: TokenTable) -> tuple[str, str] | None:
    """The side whose log-probabilities are 16-bit numbers where those of the other side are not, and their type."""
    dtypes = {"trainer": short_dtype(table.trainer), "engine": short_dtype(table.engine)}
    short = [(side, dtype) for side, dtype in dtypes.items() if dtype is not None]
    return short[0] if len(short) == 1 else None


def _with_short_column(findings: Sequence[LikelyCause], table: TokenTable) -> list[LikelyCause]:
    """Findings with "precision" for a side whose log-probabilities are 16-bit numbers.

    All hypotheses allow for that rounding, so it comes after the causes of the other differences, if there are any.
    """
    short = _short_side(table)
    if short is None:
        return list(findings)
    evidence = (
        f"all log-probabilities of the {short[0]} are {short[1]} numbers, those of the other side are not"
    )
    return [*(each for each in findings if each.cause != "precision"), likely_cause("precision", evidence)]


def _without_padding(
    rollouts: Sequence[RolloutRecord],
) -> tuple[Sequence[RolloutRecord], list[LikelyCause]]:
    """The rollouts with padding that counts left out, and the finding that says so; as they are without it.

    Where many responses end like padding, the others end with the same placeholder, also where it is there only once.
    """
    counted = [
        np.stack([each.response_ids, each.trainer, each.engine])[:, each.is_counted] for each in rollouts
    ]
    lengths = [padding_length(ids.tolist(), columns) if len(ids) else 0 for ids, *columns in counted]
    ends = [each[:, -1] for each, length in zip(counted, lengths, strict=True) if length]
    if not is_padded(len(ends), len(rollouts)):
        return rollouts, []
    placeholders, without, left_out = np.unique(ends, axis=0), list[RolloutRecord](), 0
    for rollout, each, length in zip(rollouts, counted, lengths, strict=True):
        is_placeholder = (each.T[:, None] == placeholders).all(axis=-1).any(axis=-1)
        padding = max(length, int(np.cumprod(is_placeholder[::-1]).sum()))
        is_counted = rollout.is_counted.copy()
        is_counted[np.flatnonzero(is_counted)[each.shape[1] - padding :]] = False
        without.append(replace(rollout, is_counted=is_counted))
        left_out += padding
    sentence = (
        f"{len(ends)} of {len(rollouts)} responses end with tokens at which each column has one value, as padding "
        f"does; {left_out:,} tokens in all are left out"
    )
    return without, [likely_cause("mask", sentence)]


def _findings(
    rollouts: Sequence[RolloutRecord], table: TokenTable, pair: Pair | None, limit: float, batch_tokens: int
) -> list[LikelyCause]:
    """The findings about the columns of trainer and engine, the sampler, and the reference's column."""
    shown = cause_in_values(table)
    if shown is not None:
        return [shown]
    is_faulty = _faulty_responses(table, limit)
    if is_faulty is not None:
        prefix = f"in {is_faulty.sum()} of {table.num_sequences} responses, the others are healthy: "
        faulty = [rollouts[number] for number in np.unique(table.sequence)[is_faulty]]
        return [
            replace(finding, evidence=prefix + finding.evidence)
            for finding in _findings(faulty, tabulate(faulty), pair, limit, batch_tokens)
        ]
    if pair is None:
        return _ranked(table, _hypotheses(table, None, limit), has_models=False)
    scores = common_temperature(ModelScores.of(pair, rollouts, table, batch_tokens))
    findings = unfilled_tokens(scores) or _ranked(table, _hypotheses(table, scores, limit), has_models=True)
    return (findings or other_sampler(scores, limit)) + _ranked(
        table, reference_hypotheses(scores, limit), has_models=True
    )


def _faulty_responses(table: TokenTable, limit: float) -> np.ndarray | None:
    """Boolean [responses], in rising ``table.sequence``: which differ by more than rounding at many tokens.

    None unless the others differ at few.
    """
    is_large = np.abs(table.difference) > DISTINCT * np.hypot(
        limit * table.unit, table.rounding_error + SOFTMAX_NATS
    )
    numbers = np.unique(table.sequence, return_inverse=True)[1]
    share = np.bincount(numbers, weights=is_large) / np.bincount(numbers)
    is_faulty = share > FAULTY_SHARE
    unclear = int(np.sum((share > SOUND_SHARE) & ~is_faulty))
    if min(is_faulty.sum(), (~is_faulty).sum()) < 2 or unclear > LARGEST_UNCLEAR * is_faulty.sum():
        return None
    return is_faulty


def _hypotheses(table: TokenTable, scores: ModelScores | None, limit: float) -> Iterator[Hypothesis]:
    """All hypotheses, the free one last. Those of the models stand for what the columns alone can only resemble."""
    # Errors that do not repeat themselves where the engine's values are the policy's are made by the trainer's passes.
    is_trainers = scores is not None and wrong_side(scores) == "trainer"
    yield from noise_hypotheses(table, limit, "dropout" if is_trainers else "weights")
    yield from break_hypotheses(table)
    yield from prediction_hypotheses(table, limit)
    yield from temperature_hypotheses(table, limit) if scores is None else model_hypotheses(scores, limit)
    yield from unexplained(table, limit)


def _ranked(table: TokenTable, possible: Iterable[Hypothesis], *, has_models: bool) -> list[LikelyCause]:
    """The causes among hypotheses by probability; none if rounding explains the columns."""
    hypotheses = list(possible)
    if not hypotheses:
        return []
    shares = zip(hypotheses, probabilities(table, hypotheses).tolist(), strict=True)
    best = {hypothesis.cause: (share, hypothesis.evidence) for hypothesis, share in shares if share > 0}
    probability = {cause: share for cause, (share, _) in best.items()}
    if probability.get(HEALTHY, 0.0) > LARGEST_HEALTHY:
        return []
    findings, grouped = list[LikelyCause](), {HEALTHY}
    for cause in sorted(best, key=lambda cause: -probability[cause]):
        # With the models they can be told apart, if the effect is large for the data.
        alike = tuple(
            name
            for name in (() if cause == HEALTHY else CAUSES[cause].alike)
            if name not in grouped and (not has_models or probability.get(name, 0.0) >= SMALLEST_PROBABILITY)
        )
        total = sum(probability.get(name, 0.0) for name in (cause, *alike))
        if cause not in grouped and total >= SMALLEST_PROBABILITY:
            findings.append(likely_cause(cause, best[cause][1], total, alike))
            grouped |= {cause, *alike}
    return findings
