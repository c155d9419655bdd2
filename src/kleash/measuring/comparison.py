"""Paired differences between runs, from their files: no model, no torch."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kleash.errors import OptionError, RunFolderError
from kleash.jobs.output_options import GateOptions
from kleash.measuring.sequence_clusters import Floats, clusters_of, sum_run
from kleash.measuring.training_comparison import compare_training
from kleash.reports.folder_report import kind_of_folder
from kleash.reports.formatting import shared_end
from kleash.reports.gate_verdicts import gate_of_measurement
from kleash.store import ComparedRun, Comparison, Measurement, RunDifference, RunFolder
from kleash.store.comparison import TrainingComparison
from kleash.store.measurement_summary import all_warnings
from kleash.store.statistics import (
    ALL_STATISTICS,
    BOUND_STATISTICS,
    COMPARED,
    EXP_MEAN,
    PERPLEXITIES,
    columns_of,
)
from kleash.store.steps import STEPS
from kleash.store.summary import counted
from kleash.uncertainty import Estimate, paired_difference
from kleash.version import __version__

SUMMED = (*COMPARED, *PERPLEXITIES)
"""Statistics that are summed for each prompt."""
MIN_SHARED = 0.5
"""Share of a run's prompts below which a difference gets a warning."""
SETTINGS = {
    "prompts": ("temperature", "top_p", "top_k", "min_p", "max_new_tokens"),
    "responses": ("temperature", "top_p", "top_k", "min_p"),
    "text": ("temperature", "window", "stride"),
}
"""Source -> the options that change what is measured."""


def compare(
    folders: Sequence[Path | str | Measurement],
    *,
    at_most: float | None = None,
    direction: str | None = None,
) -> Comparison | TrainingComparison:
    """The differences of measurements, or of training runs, from the first one, paired by prompt.

    Two runs share a prompt if its token ids are the same; on text, n-th copies of a window are a pair. The clusters are
    those of ``measure``: prompts, or documents, or blocks of windows where documents are few. The difference of a mean
    per token is the difference of two ratios over the shared prompts, and its error accounts for the pairing.

    Training runs are compared by reward, KL and held-out reward over the second half of the steps that all have taken
    (``compare_training``).

    Args:
        folders: two or more finished measurements, or their folders, or the folders of training runs.
        at_most: a limit in nats for the KL of every run but the first, which then has a ``gate``.
        direction: of that KL, "policy-reference" or "reference-policy"; None for that of the first run's headline.

    Raises:
        OptionError: if there are fewer than two, some are measurements and some training runs, or the limit is not a
            number of at least 0 or is for training runs.
        RunFolderError: if a run is not finished or damaged, or shares no prompt with the first.

    >>> texts = ["The sea was calm.", "A boat went out."]
    >>> for name in ("policy", "reference"):
    ...     _ = kleash.measure(policy=f"shipped:{name}", text=texts, out=f"compared/{name}")
    >>> kleash.compare(["compared/policy", "compared/reference"]).differences[0].shared_prompts
    2
    """
    run_folders = [folders] if isinstance(folders, str | Path | Measurement) else list(folders)
    if len(run_folders) < 2:
        raise OptionError(f"compare takes a list of two or more run folders; {len(run_folders)} was given")
    gate = GateOptions(at_most=at_most, direction=direction)
    paths = [Path(folder).expanduser() for folder in run_folders]
    names = _short_names(paths)
    are_training = [kind_of_folder(path) == STEPS for path in paths]
    if any(are_training):
        if not all(are_training):
            measured, trained = (paths[are_training.index(kind)] for kind in (False, True))
            Measurement.read(measured)  # raises if there is none
            raise OptionError(
                f"{measured} is a measurement and {trained} a training run; compare runs of one kind"
            )
        if at_most is not None:
            raise OptionError(f"--at-most is for measurements; {paths[0]} is the folder of a training run")
        return compare_training(paths, names)
    runs = [_read(path) for path in paths]
    first = runs[0]
    limited = gate.gated_statistic or first.measurement.headline
    differences = tuple(
        _difference(run, first, name, names[0]) for run, name in zip(runs[1:], names[1:], strict=True)
    )
    return Comparison(
        kleash=__version__,
        runs=(
            _compared(first, names[0]),
            *(_compared(run, name, at_most, limited) for run, name in zip(runs[1:], names[1:], strict=True)),
        ),
        headline=first.measurement.headline,
        differences=differences,
        warnings=_warnings(runs, names),
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    folder: Path
    measurement: Measurement
    rows: dict[tuple[int, int], int]
    """Prompt hash as an integer -> row of ``sums``; on text each copy of a window, counted from 0, has a row."""
    sums: Floats
    """[row, column]: tokens, then the statistics ``SUMMED``, NaN where the run has no values of one."""
    prompts: NDArray[np.int64]
    """Of each row, as ``distinct_prompts``: on text, where a hash is of a window, the document."""
    samples: NDArray[np.int64]
    """``sample_id`` of the first sequence of each row: on text, the window."""
    unknown: frozenset[str]
    """The statistics of ``SUMMED`` that the run leaves out, or whose columns were added after it."""

    @property
    def on_text(self) -> bool:
        """Whether the pairs are windows of documents."""
        return self.measurement.source_kind == "text"

    @property
    def noun(self) -> str:
        """ "documents" or "prompts"."""
        return "documents" if self.on_text else "prompts"


def _read(path: Path) -> _Run:
    """Read a run's measurement, and sum its token statistics by prompt."""
    measurement = Measurement.read(path)
    folder = RunFolder(path).require_shards(measurement.counts.shards)
    columns = folder.token_columns()
    known = tuple(name for name in SUMMED if columns.issuperset(ALL_STATISTICS[name].columns))
    on_text = measurement.source_kind == "text"
    sums = sum_run(
        folder,
        columns_of(known),
        lambda tokens: np.stack(
            [
                ALL_STATISTICS[name].values(tokens)
                if name in known
                else np.full(len(tokens["prompt_id"]), np.nan)
                for name in SUMMED
            ],
            axis=1,
        ),
    )
    copies = defaultdict[int, Iterator[int]](count if on_text else lambda: repeat(0))
    keys = [(prompt_hash, next(copies[prompt_hash])) for prompt_hash in sums.prompt_hash.tolist()]
    rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
    row_of_sequence = np.array([rows[key] for key in keys], dtype=np.int64)
    totals = np.zeros((len(rows), 1 + len(SUMMED)))
    np.add.at(totals, row_of_sequence, np.column_stack([sums.tokens, sums.total]))
    first_sequences = np.unique(row_of_sequence, return_index=True)[1]
    return _Run(
        folder=path,
        measurement=measurement,
        rows=rows,
        sums=totals,
        prompts=sums.distinct_prompts(on_text=on_text)[first_sequences],
        samples=sums.sample_id[first_sequences],
        unknown=frozenset(SUMMED).difference(known).union(measurement.left_out),
    )


def _difference(run: _Run, first: _Run, name: str, first_name: str) -> RunDifference:
    """The differences of a run from the first one, over the prompts that both have."""
    shared_keys = [key for key in first.rows if key in run.rows]
    if not shared_keys:
        raise RunFolderError(
            f"{run.folder} ({counted(_count(run), run.noun[:-1])}) and {first.folder} "
            f"({counted(_count(first), first.noun[:-1])}) share no {first.noun[:-1]}; compare runs over the same ones"
        )
    run_rows, first_rows = ([side.rows[key] for key in shared_keys] for side in (run, first))
    clusters = clusters_of(first.prompts[first_rows], first.samples[first_rows], on_text=first.on_text)
    minuend, subtrahend = (
        np.stack([clusters.sum(column) for column in sums.T], axis=1)
        for sums in (run.sums[run_rows], first.sums[first_rows])
    )
    shared_count = _count(first, first_rows)
    only_run, only_first = _count(run) - _count(run, run_rows), _count(first) - shared_count
    few_shared = (
        f"{name} and {first_name} share only {shared_count} {first.noun}; {only_run} and {only_first} are in only one "
        "of them"
    )
    is_warned = len(shared_keys) < MIN_SHARED * max(len(run.rows), len(first.rows))
    means = {
        statistic: paired_difference(
            minuend[:, column],
            minuend[:, 0],
            subtrahend[:, column],
            subtrahend[:, 0],
            unit=ALL_STATISTICS[statistic].unit,
            **_bounds(statistic),
            known_value=_known_difference(run, first, statistic),
        )
        for column, statistic in enumerate(COMPARED, start=1)
        if statistic not in run.unknown | first.unknown
    }
    return RunDifference(
        name=name,
        minus=first_name,
        shared_prompts=shared_count,
        only_here=only_run,
        only_there=only_first,
        differences={**means, **_perplexity_differences(minuend, subtrahend)},
        warnings=(few_shared,) if is_warned else (),
    )


def _bounds(name: str) -> dict[str, float | None]:
    """Bounds of the difference of two means of a statistic; none unless it has two bounds itself."""
    statistic = ALL_STATISTICS[name]
    if statistic.lower is None or statistic.upper is None:
        return {"lower": None, "upper": None}
    return {"lower": statistic.lower - statistic.upper, "upper": statistic.upper - statistic.lower}


def _known_difference(run: _Run, first: _Run, name: str) -> float | None:
    """0 if both runs measured the same models, as far as the statistic depends on them; otherwise None."""
    pairs = [
        (run.measurement.models[role], first.measurement.models[role]) for role in ALL_STATISTICS[name].models
    ]
    all_same = all(
        model.fingerprint and (model.fingerprint, model.dtype) == (first_model.fingerprint, first_model.dtype)
        for model, first_model in pairs
    )
    return 0.0 if all_same else None


def _count(run: _Run, rows: list[int] | None = None) -> int:
    """The number of prompts, or documents, of these rows of a run; several rows are turns, or windows, of one."""
    return len(np.unique(run.prompts if rows is None else run.prompts[rows]))


def _perplexity_differences(minuend: Floats, subtrahend: Floats) -> dict[str, Estimate]:
    """Differences of perplexities exp(m), m a mean of negative log-probabilities, by linearisation in the clusters.

    exp(m) (s_c - m n_c + n_c) sums to exp(m) sum_c n_c, and varies with cluster c as exp(m) does.

    Args:
        minuend: a run's sums by cluster, in the columns of ``_Run.sums``: tokens, ``COMPARED``, ``PERPLEXITIES``.
        subtrahend: those of the first run.
    """
    differences: dict[str, Estimate] = {}
    for column, name in enumerate(PERPLEXITIES, start=1 + len(COMPARED)):
        sides = [_perplexity_sums(sums[:, column], sums[:, 0]) for sums in (minuend, subtrahend)]
        if np.isfinite(sides).all():
            differences[name] = paired_difference(
                sides[0], minuend[:, 0], sides[1], subtrahend[:, 0], unit=EXP_MEAN.unit
            )
    return differences


@np.errstate(over="ignore", invalid="ignore")
def _perplexity_sums(values: Floats, tokens: Floats) -> Floats:
    """The linear terms of a perplexity, from sums of negative log-probabilities and numbers of tokens by cluster."""
    mean = values.sum() / tokens.sum()
    return np.exp(mean) * (values - mean * tokens + tokens)


def _compared(run: _Run, name: str, at_most: float | None = None, limited: str | None = None) -> ComparedRun:
    """A run's entry in the comparison, with the gate of the KL called ``limited`` if there is a limit."""
    measurement = run.measurement
    numbers = measurement.statistics()
    return ComparedRun(
        name=name,
        folder=str(run.folder),
        estimand=measurement.estimand,
        policy=measurement.models["policy"].path,
        reference=measurement.models["reference"].path,
        counts=measurement.counts,
        numbers={name: numbers[name] for name in (*SUMMED, *BOUND_STATISTICS) if name in numbers},
        noise_floor=measurement.noise_floor,
        gate=None if at_most is None else gate_of_measurement(measurement, at_most, limited),
        warnings=tuple(all_warnings(measurement)),
        source=measurement.source_kind,
    )


def _short_names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that are all different, without what all have in common behind it."""
    parts = [folder.resolve().parts for folder in folders]
    shared = shared_end(parts)
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[: len(part) - shared][-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part[-1:])} ({place})" for place, part in enumerate(parts, start=1)]


def _warnings(runs: list[_Run], names: list[str]) -> tuple[str, ...]:
    """Warnings about differences between the runs other than the policy: reference and options."""
    first = runs[0].measurement
    warnings: list[str] = []
    for run, name in zip(runs[1:], names[1:], strict=True):
        other = run.measurement
        references = [measurement.models["reference"] for measurement in (other, first)]
        # a server does not show its weights, so that its address stands for them
        if len({reference.fingerprint or reference.path for reference in references}) > 1:
            is_known = all(reference.fingerprint for reference in references)
            verb = "has" if is_known else "may have, behind a server,"
            warnings.append(f"{name} {verb} another reference than {names[0]}")
        settings, first_settings = _settings(other), _settings(first)
        warnings += [
            f"{name} was measured with {option} {value}, {names[0]} with {first_settings[option]}"
            for option, value in settings.items()
            if value != first_settings.get(option, value)
        ]
    return tuple(warnings)


def _settings(measurement: Measurement) -> dict[str, Any]:
    """What changes the numbers, by name: source, options, and the models' dtype ("auto" is one on each device)."""
    dtypes = dict.fromkeys(model.dtype for model in measurement.models.values())
    dtypes.pop("unknown", None)  # of a model behind a server
    return {
        "source": measurement.source_kind,
        **{option: measurement.job.get(option) for option in SETTINGS[measurement.source_kind]},
        "dtype": " and ".join(dtypes),
    }
