"""All numbers of a result as rows of one table, whose columns are the same for every kind of result."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kleash.estimate import Estimate
from kleash.store.comparison import ComparedTraining, Comparison, TrainingComparison
from kleash.store.measurement import Measurement
from kleash.store.metrics import per_what
from kleash.store.rollout_results import Diagnosis, MismatchRecord
from kleash.store.sweep import Sweep, SweepCandidate

NumericResult = Measurement | Comparison | TrainingComparison | Sweep | MismatchRecord | Diagnosis


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
    """"nats", "probability", "bytes", "bits", "tokens" or "none"; of a target also " per sequence" or " per token"."""
    tokens: int | None = None
    """Tokens that the number is an average over."""
    clusters: int | None = None
    """Independent groups of sequences behind the interval."""
    warnings: tuple[str, ...] = ()

    @property
    def numbers(self) -> dict[str, float | None]:
        """Value, standard error and ends of the interval, by the names that tables and trackers have for them."""
        low, high = self.ci95 or (None, None)
        return {
            "value": self.value,
            "standard_error": self.standard_error,
            "ci95_low": low,
            "ci95_high": high,
        }


def number_rows(result: NumericResult) -> list[NumberRow]:
    """The numbers of a result, in the order of its JSON."""
    match result:
        case Measurement():
            return list(_of_measurement(result))
        case Comparison() | TrainingComparison():
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
    run, counts, total = measurement.models["policy"].path, measurement.counts, measurement.per_sequence
    of_sequences = total and {
        "sequence_kl_policy_reference": total.kl_policy_reference,
        "sequence_monte_carlo": total.monte_carlo,
        "sequence_exact_terms": total.exact_terms,
        "sequence_largest_token": total.largest_token,
    }
    of_estimators = {
        name: number
        for estimator, record in measurement.estimators.items()
        for name, number in (
            (f"estimator_{estimator}", record),
            (f"estimator_{estimator}_bias", record.bias),
        )
        if number is not None
    }
    of_quantiles = {
        f"{column}_{level}": number
        for column, levels in measurement.quantiles.items()
        for level, number in levels.items()
    }
    numbers = {**measurement.statistics(), **(of_sequences or {}), **of_estimators, **of_quantiles}
    for name, number in numbers.items():
        yield _row(run, name, number, tokens=counts.tokens, clusters=counts.clusters)
    for name, number in (("noise_floor", measurement.noise_floor), ("dtype_gap", measurement.dtype_gap)):
        if number is not None:
            yield _row(run, name, number)
    for name, record in measurement.estimators.items():
        yield NumberRow(run=run, name=f"estimator_{name}_spread", value=record.spread, unit="nats")
    yield NumberRow(
        run=run, name="top_percent_share", value=measurement.top_percent_share, unit="probability"
    )


def _of_measurement(measurement: Measurement) -> Iterator[NumberRow]:
    """The numbers of a measurement, and the KL of each bin."""
    yield from measurement_rows(measurement)
    run = measurement.models["policy"].path
    for kind, bins in (("position", measurement.by_position), ("confidence", measurement.by_confidence)):
        for each in bins:
            name = f"{measurement.headline}_by_{kind}_{each.low:g}_to_{each.high:g}"
            yield _row(run, name, each.kl, tokens=each.tokens)


def _of_comparison(comparison: Comparison | TrainingComparison) -> Iterator[NumberRow]:
    """The numbers of each run, then the differences."""
    for run in comparison.runs:
        if isinstance(run, ComparedTraining):
            yield from (
                _row(run.name, name, replace(number, unit=number.unit + per_what(name, run.target_per)))
                for name, number in run.numbers.items()
            )
            continue
        for name, number in run.numbers.items():
            yield _row(run.name, name, number, tokens=run.counts.tokens, clusters=run.counts.clusters)
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
    if candidate.noise_floor is not None:
        yield _row(candidate.name, "noise_floor", candidate.noise_floor)


def _of_sweep(sweep: Sweep) -> Iterator[NumberRow]:
    """The numbers of each candidate, then those of pairs and of attributions with both of their intervals."""
    names = {candidate.number: candidate.name for candidate in sweep.candidates}
    for candidate in sweep.ranking:
        yield from candidate_rows(sweep, candidate)
    for pair in sweep.pairs:
        simultaneous = replace(pair.difference, ci95=pair.simultaneous_ci95)
        for suffix, number in (("", pair.difference), ("_simultaneous", simultaneous)):
            yield _row(
                names[pair.first],
                f"{sweep.rank_by}{suffix}",
                number,
                minus=names[pair.second],
                tokens=sweep.tokens,
                clusters=sweep.clusters,
            )
    for attribution in sweep.attributions:
        for group in attribution.groups:
            for suffix, number in (("", group.change), ("_simultaneous", group.simultaneous_change)):
                yield _row(
                    names[attribution.candidate],
                    f"{attribution.statistic}_change/{attribution.grouping}/{group.name}{suffix}",
                    number,
                    tokens=attribution.tokens,
                    clusters=attribution.clusters,
                )


def _of_mismatch(record: MismatchRecord) -> Iterator[NumberRow]:
    """The numbers of all rollouts, or under the names of another package, then the KL of each file."""
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
