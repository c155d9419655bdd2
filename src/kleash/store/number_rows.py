"""All numbers of a result as rows of one table, whose columns are the same for every kind of result."""

from collections.abc import Iterator
from dataclasses import dataclass

from kleash.estimate import Estimate
from kleash.store.comparison import Comparison
from kleash.store.measurement import Bin, Counts, Measurement
from kleash.store.rollout_results import Diagnosis, MismatchRecord
from kleash.store.sweep import Sweep, SweepCandidate

NumericResult = Measurement | Comparison | Sweep | MismatchRecord | Diagnosis


@dataclass(frozen=True, kw_only=True)
class NumberRow:
    """A number of a result; what it does not have is None."""

    run: str
    """The model, the run or the file that it is a number of."""
    minus: str = ""
    """Of a difference, the run or model that is taken from ``run``."""
    name: str
    """Of the number: that in ``STATISTICS`` or in the JSON of the result."""
    value: float
    standard_error: float | None = None
    """NaN if it is not known."""
    ci95: tuple[float, float] | None = None
    unit: str = "none"
    """"nats", "probability", "bytes", "bits", "tokens" or "none"."""
    tokens: int | None = None
    """Tokens that the number is an average over."""
    clusters: int | None = None
    """Independent groups of sequences behind the interval."""
    warnings: tuple[str, ...] = ()


def number_rows(result: NumericResult) -> list[NumberRow]:
    """The numbers of a result, in the order of its JSON."""
    match result:
        case Measurement():
            return list(_of_measurement(result))
        case Comparison():
            return list(_of_comparison(result))
        case Sweep():
            return list(_of_sweep(result))
        case MismatchRecord():
            return list(_of_mismatch(result))
        case Diagnosis():
            return [
                NumberRow(run=result.file, name=cause.cause, value=cause.probability, unit="probability")
                for cause in result.findings
            ]


def measurement_rows(measurement: Measurement) -> Iterator[NumberRow]:
    """The numbers of a measurement that are over all of its tokens."""
    run, counts = measurement.models["policy"].path, measurement.counts
    for name, number in measurement.statistics().items():
        yield _counted(run, name, number, counts)
    if measurement.per_sequence is not None:
        total = measurement.per_sequence
        yield _counted(run, "sequence_kl_policy_reference", total.kl_policy_reference, counts)
        yield _counted(run, "sequence_monte_carlo", total.monte_carlo, counts)
        yield _counted(run, "sequence_exact_terms", total.exact_terms, counts)
    for name, number in (("noise_floor", measurement.noise_floor), ("dtype_gap", measurement.dtype_gap)):
        if number is not None:
            yield _row(run, name, number)
    for name, record in measurement.estimators.items():
        yield _counted(run, f"estimator_{name}", record, counts)
        if record.bias is not None:
            yield _counted(run, f"estimator_{name}_bias", record.bias, counts)
        yield NumberRow(run=run, name=f"estimator_{name}_spread", value=record.spread, unit="nats")
    for column, levels in measurement.quantiles.items():
        for level, number in levels.items():
            yield _counted(run, f"{column}_{level}", number, counts)
    yield NumberRow(
        run=run, name="top_percent_share", value=measurement.top_percent_share, unit="probability"
    )


def _of_measurement(measurement: Measurement) -> Iterator[NumberRow]:
    yield from measurement_rows(measurement)
    run = measurement.models["policy"].path
    yield from _of_bins(run, f"{measurement.headline}_by_position", measurement.by_position)
    yield from _of_bins(run, f"{measurement.headline}_by_confidence", measurement.by_confidence)


def _of_bins(run: str, name: str, bins: tuple[Bin, ...]) -> Iterator[NumberRow]:
    for each in bins:
        yield _row(run, f"{name}_{each.low:g}_to_{each.high:g}", each.kl, tokens=each.tokens)


def _of_comparison(comparison: Comparison) -> Iterator[NumberRow]:
    for run in comparison.runs:
        for name, number in run.numbers.items():
            yield _counted(run.name, name, number, run.counts)
        if run.noise_floor is not None:
            yield _row(run.name, "noise_floor", run.noise_floor)
    for difference in comparison.differences:
        for name, number in difference.differences.items():
            yield _row(difference.name, name, number, minus=difference.minus)


def candidate_rows(sweep: Sweep, candidate: SweepCandidate) -> Iterator[NumberRow]:
    """The numbers of a candidate of a sweep."""
    for name, number in candidate.numbers.items():
        yield _row(candidate.name, name, number, tokens=sweep.tokens, clusters=sweep.clusters)
    for name, value, unit in (
        ("bytes_on_disk", candidate.bytes_on_disk, "bytes"),
        ("bits_per_weight", candidate.bits_per_weight, "bits"),
    ):
        if value is not None:
            yield NumberRow(run=candidate.name, name=name, value=value, unit=unit)


def _of_sweep(sweep: Sweep) -> Iterator[NumberRow]:
    names = {candidate.number: candidate.name for candidate in sweep.candidates}
    for candidate in sweep.ranking:
        yield from candidate_rows(sweep, candidate)
    for pair in sweep.pairs:
        for suffix, ci95 in (("", pair.difference.ci95), ("_simultaneous", pair.simultaneous_ci95)):
            yield NumberRow(
                run=names[pair.first],
                minus=names[pair.second],
                name=f"{sweep.rank_by}{suffix}",
                value=pair.difference.value,
                standard_error=pair.difference.standard_error,
                ci95=ci95,
                unit=pair.difference.unit,
                tokens=sweep.tokens,
                clusters=sweep.clusters,
                warnings=pair.difference.warnings,
            )
    for attribution in sweep.attributions:
        run, sample = names[attribution.candidate], (attribution.tokens, attribution.clusters)
        for group in attribution.groups:
            name = f"{attribution.statistic}_change/{attribution.grouping}/{group.name}"
            yield _row(run, name, group.change, tokens=sample[0], clusters=sample[1])
            yield _row(
                run,
                f"{name}_simultaneous",
                group.simultaneous_change,
                tokens=sample[0],
                clusters=sample[1],
            )


def _of_mismatch(record: MismatchRecord) -> Iterator[NumberRow]:
    if record.renamed:
        for name, value in record.renamed.items():
            yield NumberRow(run=record.file, name=name, value=value)
        return
    for name, number in record.numbers.items():
        yield _row(record.file, name, number, tokens=record.tokens, clusters=record.prompts)
    for name, value in record.values.items():
        yield NumberRow(run=record.file, name=name, value=value)
    for file, number in record.kl_by_file.items():
        yield _row(file, "kl_engine_trainer", number)


def _counted(run: str, name: str, number: Estimate, counts: Counts) -> NumberRow:
    """A number over all tokens of a run."""
    return _row(run, name, number, tokens=counts.tokens, clusters=counts.clusters)


def _row(
    run: str,
    name: str,
    number: Estimate,
    *,
    minus: str = "",
    tokens: int | None = None,
    clusters: int | None = None,
) -> NumberRow:
    return NumberRow(
        run=run,
        minus=minus,
        name=name,
        value=number.value,
        standard_error=number.standard_error,
        ci95=number.ci95,
        unit=number.unit,
        tokens=tokens,
        clusters=clusters,
        warnings=number.warnings,
    )
