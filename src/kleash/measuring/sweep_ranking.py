"""The numbers of a sweep, from the run folders of its candidates: order, ties and the Pareto front."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kleash.errors import RunFolderError
from kleash.jobs.sweep import SweepJob
from kleash.measuring.model_pair import recorded_versions
from kleash.measuring.sequence_clusters import Clusters, SequenceSums
from kleash.store import Measurement
from kleash.store.measurement_summary import all_warnings
from kleash.store.statistics import KL_DIRECTIONS
from kleash.store.sweep import QUANTILE, Sweep, SweepCandidate, SweepPair
from kleash.uncertainty import Estimate
from kleash.uncertainty.diagnostics import few_clusters
from kleash.uncertainty.simultaneous import SimultaneousPairs, simultaneous_differences
from kleash.version import __version__


def measured_candidate(candidate: SweepCandidate, measurement: Measurement) -> SweepCandidate:
    """A candidate with the numbers of its measurement."""
    weights = measurement.models["policy"].weights
    quantiles = {
        f"{name}_{QUANTILE}": measurement.quantiles[name][QUANTILE]
        for name in KL_DIRECTIONS
        if name in measurement.quantiles
    }
    return replace(
        candidate,
        numbers={**measurement.statistics(), **quantiles},
        noise_floor=measurement.noise_floor,
        bytes_on_disk=None if weights is None else weights.bytes,
        bits_per_weight=None if weights is None else weights.bits_per_weight,
        warnings=tuple(all_warnings(measurement)),
        notes=measurement.notes,
    )


def rank_candidates(
    job: SweepJob,
    out: Path,
    candidates: Sequence[SweepCandidate],
    sequences: Mapping[int, SequenceSums],
) -> Sweep:
    """The sweep of candidates of which each was measured, or failed.

    Args:
        job: the sweep.
        out: its folder.
        candidates: all of them, in the order of the command line.
        sequences: of the runs of those that were measured, by number, summed of the statistic that ranks.

    Raises:
        RunFolderError: if the runs are not over the same sequences.
    """
    measured = [candidate for candidate in candidates if not candidate.failure]
    sweep = Sweep(
        kleash=__version__,
        reference=job.reference,
        rank_by=job.statistic,
        job=job.settings(),
        candidates=tuple(candidates),
        pairs=(),
        clusters=0,
        tokens=0,
        critical_value=float("nan"),
        versions=recorded_versions(),
    )
    if not measured:
        return sweep
    runs = [sequences[candidate.number] for candidate in measured]
    for candidate, run in zip(measured[1:], runs[1:], strict=True):
        _require_same_sequences(out, measured[0], runs[0], candidate, run)
    clusters = runs[0].clusters(on_text=job.responses is None)
    letters, front = {}, pareto_front(measured, job.statistic)
    if len(measured) > 1:
        result = _differences([candidate.numbers[job.statistic] for candidate in measured], runs, clusters)
        letters = dict(zip((each.number for each in measured), result.letters, strict=True))
        pairs = tuple(
            SweepPair(
                first=measured[pair.first].number,
                second=measured[pair.second].number,
                difference=pair.estimate,
                simultaneous_ci95=pair.simultaneous_ci95,
                is_tie=pair.is_tie,
            )
            for pair in result.pairs
        )
        sweep = replace(sweep, pairs=pairs, critical_value=result.critical_value)
    return replace(
        sweep,
        clusters=clusters.count,
        tokens=int(runs[0].tokens.sum()),
        warnings=(*clusters.warnings, *few_clusters(clusters.count)),
        candidates=tuple(
            replace(each, letters=letters.get(each.number, ""), is_on_pareto_front=each.number in front)
            for each in candidates
        ),
    )


def _differences(
    numbers: Sequence[Estimate], runs: Sequence[SequenceSums], clusters: Clusters
) -> SimultaneousPairs:
    """The differences of all pairs of candidates: ``numbers`` are their means, ``runs`` what these are means of."""
    sums = np.stack([clusters.sum(run.total) for run in runs], axis=1)
    counts = np.stack([clusters.sum(run.tokens) for run in runs], axis=1)
    known_values = [number.value if number.is_exact else None for number in numbers]
    return simultaneous_differences(sums, counts, known_values=known_values)


def pareto_front(candidates: Sequence[SweepCandidate], statistic: str) -> set[int]:
    """The numbers of candidates than which no other is both at most as large and at most as far from the reference.

    A candidate of unknown size is not on the front, and keeps no other from it.
    """
    points = {
        candidate.number: (candidate.bytes_on_disk, candidate.numbers[statistic].value)
        for candidate in candidates
        if candidate.bytes_on_disk is not None
    }
    return {
        number
        for number, (size, kl) in points.items()
        if not any(
            other_size <= size and other_kl <= kl and (other_size, other_kl) != (size, kl)
            for other_size, other_kl in points.values()
        )
    }


def _require_same_sequences(
    out: Path,
    first: SweepCandidate,
    first_sequences: SequenceSums,
    candidate: SweepCandidate,
    sequences: SequenceSums,
) -> None:
    """Check that two candidates were measured on the same sequences.

    Raises:
        RunFolderError: if not.
    """
    is_same = all(
        np.array_equal(getattr(first_sequences, name), getattr(sequences, name))
        for name in ("prompt_id", "sample_id", "prompt_hash", "tokens")
    )
    if not is_same:
        raise RunFolderError(
            f"{out / candidate.folder} ({len(sequences.tokens)} sequences) was not measured on the sequences of "
            f"{out / first.folder} ({len(first_sequences.tokens)}); remove the one that is older and run the "
            "sweep again with --resume"
        )
