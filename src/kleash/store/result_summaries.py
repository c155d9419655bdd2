"""The summaries of all kinds of results, registered for ``summarize``."""

import math
from collections.abc import Mapping

from kleash.estimate import Estimate
from kleash.store.anchors import scale_sentence
from kleash.store.audit import FAULTS, Audit
from kleash.store.codec import encode
from kleash.store.comparison import (
    PAIRED,
    SHOWN,
    ComparedRun,
    Comparison,
    RunDifference,
    TrainingComparison,
)
from kleash.store.measurement import Measurement, Verdict, describe_storage
from kleash.store.measurement_summary import (
    all_warnings,
    describe_quantiles,
    describe_sample_size,
    headline,
    headline_name,
    joined_labels,
    left_out_sentences,
    merge_labelled,
    merge_warnings,
    summary_numbers,
    upper_bound,
    with_ranges,
)
from kleash.store.metrics import METRICS, OTHER, metric_of, number_of, per_what, title_of
from kleash.store.rollout_results import LABELS, Diagnosis, MismatchRecord
from kleash.store.statistics import PERPLEXITIES, kl_directions, label_of
from kleash.store.summary import (
    GATE,
    MAX_WORDS,
    NUMBER_HEADER,
    UNKNOWN_INTERVAL,
    Name,
    Summary,
    SummaryTable,
    cells,
    counted,
    summarize,
    with_error,
    with_interval,
)
from kleash.store.sweep import QUANTILE, Attribution, Sweep, SweepCandidate
from kleash.store.training_folder import MAX_LISTED, TrainingResult

EXTREMES = (
    ("effective_sample_size", "effective sample size", "{:,.0f} tokens"),
    ("largest_log_ratio", "largest log ratio", "{:.4g} nats"),
)
"""Values of a mismatch that its summary has: name, label and format."""
DIFFERENCE_HEADER = ("95 % interval", "difference from the first", "95 % interval")
"""Header beside that of a run's own number."""
ALIKE = (
    'causes joined by "or": the data cannot tell these apart; the next test can, or --policy and --reference '
    "if they were not given"
)


def _value_cells(number: Estimate) -> tuple[str, str]:
    """The value with its unit, and the interval."""
    value, interval, _, unit = cells(number)
    return f"{value} {unit}", interval or UNKNOWN_INTERVAL


def _number_row(label: str, number: Estimate, *, is_one_cluster: bool = False) -> tuple[str, ...]:
    """A row under ``NUMBER_HEADER``; with one cluster the interval is unknown, even if the number has bounds."""
    value, interval, error, unit = cells(number)
    interval = UNKNOWN_INTERVAL if is_one_cluster or not interval else interval
    return label, value, interval, error or "unknown", unit


def _gate_fact(gate: Verdict | None, name: str = "") -> tuple[tuple[str, str], ...]:
    """The verdict of a gate as a fact; none without a gate."""
    if gate is None:
        return ()
    sentence = f"{gate.verdict}: {gate.label} at most {gate.limit}"
    return ((f"{GATE}, {name}" if name else GATE, sentence),)


@summarize.register
def _(measurement: Measurement) -> Summary:
    counts, is_one_cluster = measurement.counts, measurement.counts.clusters < 2
    upper = upper_bound(measurement)
    text = f"{label_of(headline_name(measurement))} per token: {with_interval(headline(measurement))}"
    if upper is not None:
        text += f"; {label_of(f'{measurement.headline}_upper')}: {with_interval(upper)}"
    storage = describe_storage(measurement.models)
    dtypes = ", ".join(dict.fromkeys(model.dtype for model in measurement.models.values()))
    return Summary(
        headline=f"{text}; {storage}" if storage else text,
        facts=(
            *((role, Name(model.path)) for role, model in measurement.models.items()),
            ("dtype", f"{dtypes} on {measurement.device}" if measurement.device else dtypes),
            ("estimand", measurement.estimand),
            ("sample", f"{counted(counts.tokens, 'token')} in {describe_sample_size(measurement)}"),
            *((("tokens", quantiles),) if (quantiles := describe_quantiles(measurement)) else ()),
            *((("for scale", scale),) if (scale := scale_sentence(measurement)) else ()),
            *_gate_fact(measurement.gate),
            *(("left out", sentence) for sentence in left_out_sentences(measurement)),
            *(("note", note) for note in measurement.notes),
        ),
        tables=(
            SummaryTable(
                header=NUMBER_HEADER,
                rows=tuple(
                    _number_row(label, number, is_one_cluster=is_one_cluster)
                    for label, number in summary_numbers(measurement)
                ),
            ),
        ),
        warnings=tuple(all_warnings(measurement)),
    )


@summarize.register
def _(comparison: Comparison) -> Summary:
    first = comparison.runs[0]
    pairs = list(zip(comparison.runs, (None, *comparison.differences), strict=True))
    kl_tables = tuple(
        SummaryTable(
            header=("run", label_of(kl), *DIFFERENCE_HEADER, f"shared {comparison.paired_noun}"),
            rows=tuple(_kl_row(run, difference, kl) for run, difference in pairs),
        )
        for kl in (*kl_directions(comparison.headline), "llama_cpp_kld")
        if all(kl in run.numbers or f"{kl}_lower" in run.numbers for run in comparison.runs)
    )
    perplexity_table = SummaryTable(
        header=("run", *map(label_of, PERPLEXITIES), "difference of the policy's", "95 % interval"),
        rows=tuple(
            (
                Name(run.name),
                *(with_error(run.numbers[name]) if name in run.numbers else "" for name in PERPLEXITIES),
                *_difference_cells(difference, PERPLEXITIES[0]),
            )
            for run, difference in pairs
        ),
    )
    has_perplexity = any(name in run.numbers for run in comparison.runs for name in PERPLEXITIES)
    return Summary(
        headline=f"{len(comparison.runs)} runs compared, paired by {comparison.paired_noun.removesuffix('s')}; each "
        "interval is of one difference alone, which is not significant if the interval contains 0",
        facts=(
            ("reference", Name(first.reference)),
            ("estimand", f"of {first.name}, the first: {first.estimand}"),
            *(fact for run in comparison.runs for fact in _gate_fact(run.gate, run.name)),
        ),
        tables=(*kl_tables, *((perplexity_table,) if has_perplexity else ())),
        warnings=tuple(comparison_warnings(comparison)),
    )


@summarize.register
def _(comparison: TrainingComparison) -> Summary:
    paired = (comparison.runs[0].numbers, *(each.differences for each in comparison.differences))
    tables = [
        SummaryTable(
            header=("run", title_of(metric), *DIFFERENCE_HEADER, "shared prompts"),
            rows=tuple(
                (
                    Name(run.name),
                    *_number_cells(run.numbers.get(metric)),
                    *_difference_cells(difference, metric),
                    str(numbers[metric].clusters) if metric in numbers else "0",
                )
                for run, difference, numbers in zip(
                    comparison.runs, (None, *comparison.differences), paired, strict=True
                )
            ),
        )
        for metric in PAIRED
        if any(metric in run.numbers for run in comparison.runs)
    ]
    named = [
        *((run.name, run.numbers) for run in comparison.runs),
        *((f"{each.name} minus {each.minus}", each.differences) for each in comparison.differences),
    ]
    shown = [name for name in SHOWN if any(name in run.numbers for run in comparison.runs)]
    shown_table = SummaryTable(
        header=("run", *(title_of(name, has_unit=True) for name in shown), "alerts", "steps"),
        rows=tuple(
            (
                Name(run.name),
                *(
                    f"{run.numbers[name].value:.4g}{per_what(name, run.target_per)}"
                    if name in run.numbers
                    else ""
                    for name in shown
                ),
                str(run.alerts),
                f"{run.steps}, {run.ended if len(run.ended) <= MAX_WORDS else 'stopped'}",
            )
            for run in comparison.runs
        ),
    )
    return Summary(
        headline=f"{len(comparison.runs)} training runs compared over steps {comparison.first_step} to "
        f"{comparison.last_step}, "
        + (
            "paired by prompt; each interval is of one difference alone, which is not significant if the interval "
            "contains 0, and by another seed alone runs may differ by more"
            if comparison.is_paired
            else "not paired: none of their numbers is known by prompt for both"
        ),
        facts=(
            *(
                (f"{run.name} has", ", ".join(f"{name} {text}" for name, text in run.settings.items()))
                for run in comparison.runs
                if run.settings
            ),
            *((run.name, run.ended) for run in comparison.runs if len(run.ended) > MAX_WORDS),
        ),
        tables=(*tables, shown_table),
        warnings=tuple(
            dict.fromkeys(
                [
                    *comparison.warnings,
                    *(text for each in comparison.differences for text in each.warnings),
                    *merge_warnings((name, number) for name, numbers in named for number in numbers.values()),
                ]
            )
        ),
    )


def _number_cells(number: Estimate | None) -> tuple[str, str]:
    """A number with its error, and its interval."""
    if number is None:
        return "not measured", ""
    interval = cells(number)[1] if any(map(math.isfinite, number.ci95)) else ""
    return with_error(number), interval or UNKNOWN_INTERVAL


def comparison_warnings(comparison: Comparison) -> list[str]:
    """The warnings about the comparison, its differences and its runs.

    Each is said once, with the names of the runs that it is about; what is said of a run is not repeated for its
    differences.
    """
    of_runs = merge_labelled((run.name, warning) for run in comparison.runs for warning in run.warnings)
    of_differences = merge_labelled(
        (f"{difference.name} minus {difference.minus}", warning)
        for difference in comparison.differences
        for warning in merge_warnings(
            ((label_of(name), number) for name, number in difference.differences.items()),
            [warning for run in comparison.runs for warning in run.warnings],
        )
    )
    named = [
        f"{joined_labels(list(warnings))}: {with_ranges(list(warnings.values()))}"
        for warnings in (*of_differences, *of_runs)
    ]
    of_pairs = (warning for difference in comparison.differences for warning in difference.warnings)
    return list(dict.fromkeys([*comparison.warnings, *of_pairs, *named]))


def _kl_row(run: ComparedRun, difference: RunDifference | None, name: str) -> tuple[str, ...]:
    """A run's KL of a direction, or the range between its bounds, and its difference from the first run."""
    if name in run.numbers:
        kl = _value_cells(run.numbers[name])
    else:
        low, high = (run.numbers[f"{name}_{end}"] for end in ("lower", "upper"))
        kl = (f"{low.rounded} to {high.rounded} {low.unit}", UNKNOWN_INTERVAL)
    shared = run.counts.prompts if difference is None else difference.shared_prompts
    return (Name(run.name), *kl, *_difference_cells(difference, name), f"{shared:,}")


def _difference_cells(difference: RunDifference | None, name: str) -> tuple[str, str]:
    """A difference and its interval; empty of the first run."""
    if difference is None:
        return "", ""
    number = difference.differences.get(name)
    return ("unknown", "unknown") if number is None else _number_cells(number)


@summarize.register
def _(sweep: Sweep) -> Summary:
    header = (
        *("candidate", "", label_of(sweep.rank_by), "95 % interval", f"{QUANTILE} % of tokens"),
        *(label_of(name) for name in sweep.other_direction),
    )
    limit = () if sweep.gate is None else (f"at most {sweep.gate.limit}",)
    ties = "; those that share a letter are tied" if len(sweep.ranking) > 1 else ""
    return Summary(
        headline=f"{counted(len(sweep.ranking), 'candidate')} by {label_of(sweep.rank_by)} per token{ties}",
        facts=(
            ("reference", Name(sweep.reference)),
            (
                "read",
                (
                    f"{sweep.job.get('text') or sweep.job.get('responses') or 'shipped:text'}, "
                    f"all models at temperature {sweep.job.get('temperature') or 1.0:g}"
                ),
            ),
            ("sample", f"{counted(sweep.tokens, 'token')}, {counted(sweep.clusters, 'independent cluster')}"),
            *dict.fromkeys(
                (
                    "attributed on",
                    f"{counted(each.tokens, 'token')}, {counted(each.clusters, 'independent cluster')}",
                )
                for each in sweep.attributions
                if not each.failure
            ),
            *(("note", note) for note in sweep.notes),
            *_gate_fact(sweep.gate),
        ),
        tables=(
            SummaryTable(
                header=(*header, "MB on disk", "bits a weight", "Pareto front", *limit),
                rows=tuple(_candidate_row(candidate, sweep) for candidate in sweep.ranking),
            ),
            *(
                (
                    SummaryTable(
                        title="Not measured",
                        header=("candidate", "reason"),
                        rows=tuple((Name(candidate.name), candidate.failure) for candidate in sweep.failed),
                    ),
                )
                if sweep.failed
                else ()
            ),
            *(attribution_table(sweep, attribution) for attribution in sweep.attributions),
        ),
        warnings=(
            *sweep.warnings,
            *merge_warnings(
                (
                    *((each.name, each.numbers[sweep.rank_by]) for each in sweep.ranking),
                    *(
                        (f"{sweep.candidates[each.candidate - 1].name} by {each.grouping}", each)
                        for each in sweep.attributions
                    ),
                ),
                sweep.warnings,
            ),
        ),
    )


def _candidate_row(candidate: SweepCandidate, sweep: Sweep) -> tuple[str, ...]:
    quantile = candidate.numbers.get(f"{sweep.rank_by}_{QUANTILE}")
    size, bits = candidate.bytes_on_disk, candidate.bits_per_weight
    return (
        Name(candidate.name),
        candidate.letters,
        *_value_cells(candidate.numbers[sweep.rank_by]),
        "" if quantile is None else cells(quantile)[0],
        *(with_error(candidate.numbers[name]) for name in sweep.other_direction),
        "unknown" if size is None else f"{size / 1e6:.4g}",
        "unknown" if bits is None else f"{bits:.2f}",
        "yes" if candidate.is_on_pareto_front else "",
        *(() if candidate.gate is None else (candidate.gate.verdict,)),
    )


def attribution_table(sweep: Sweep, attribution: Attribution) -> SummaryTable:
    """The changes of a candidate's groups of weights, the largest part of the KL first; or why there are none."""
    names = {candidate.number: candidate.name for candidate in sweep.candidates}
    title = f"{names[attribution.candidate]} by {attribution.grouping}, one group of weights swapped back"
    if attribution.failure:
        return SummaryTable(title=title, header=("not attributed",), rows=((attribution.failure,),))
    rows: list[tuple[str, ...]] = []
    for group in attribution.largest_first:
        value, interval = _value_cells(group.simultaneous_change)
        share = attribution.share_of(group)
        rows.append(
            (
                group.name,
                value,
                "identical weights" if group.is_identical else interval,
                "" if math.isnan(share) else f"{100 * share:.1f} %",
                f"{group.parameters:,}",
            )
        )
    rows += [(name, *_value_cells(number), "", "") for name, number in attribution.changes_together.items()]
    return SummaryTable(
        title=title,
        header=("group", "change", "simultaneous 95 % interval", "share of the KL", "weights"),
        rows=tuple(rows),
    )


@summarize.register
def _(record: MismatchRecord) -> Summary:
    kl = "kl_engine_trainer"
    numbers = [] if record.renamed else [(label, record.numbers[name]) for name, label in LABELS.items()]
    table = SummaryTable(
        header=NUMBER_HEADER, rows=tuple(_number_row(label, number) for label, number in numbers)
    )
    if record.renamed:
        rows = tuple((name, str(encode(value))) for name, value in record.renamed.items())
        table = SummaryTable(header=("metric", "value"), rows=rows)
    return Summary(
        headline=f"{LABELS[kl]} per token: {with_interval(record.numbers[kl])}",
        facts=(
            ("rollouts", Name(record.file)),
            ("sample", f"{_rollouts(record)} to {counted(record.prompts, 'prompt')}{_files(record)}"),
            *(
                (label, form.format(record.values[name]))
                for name, label, form in EXTREMES
                if name in record.values
            ),
            *(("note", note) for note in record.notes),
            *_gate_fact(record.gate),
        ),
        tables=(table, *_table_of_files(record)),
        warnings=tuple(merge_warnings(numbers)),
    )


def _rollouts(record: MismatchRecord | Diagnosis) -> str:
    """The number of tokens and responses, in words."""
    return f"{counted(record.tokens, 'token')} in {counted(record.sequences, 'response')}"


def _files(record: MismatchRecord | Diagnosis) -> str:
    """How many files were read, where they are several."""
    return f", from {len(record.files)} files" if len(record.files) > 1 else ""


def _table_of_files(record: MismatchRecord) -> tuple[SummaryTable, ...]:
    """The KL of each of several files, the largest first; empty for one file."""
    by_kl = sorted(record.kl_by_file.items(), key=lambda item: -item[1].value)
    rows = tuple((Name(file), *_number_row("", number)[1:]) for file, number in by_kl)
    title = f"{LABELS['kl_engine_trainer']} by file"
    return (SummaryTable(title=title, header=("", *NUMBER_HEADER[1:]), rows=rows),) if rows else ()


@summarize.register
def _(diagnosis: Diagnosis) -> Summary:
    if diagnosis.findings:
        text = f"likeliest cause of the mismatch: {diagnosis.findings[0].cause}"
    else:
        text = "no finding: rounding explains the differences" if diagnosis.examined else "no diagnosis"
    return Summary(
        headline=text,
        facts=(
            ("rollouts", Name(diagnosis.file)),
            *(("scored again by", Name(model)) for model in diagnosis.models),
            ("sample", f"{_rollouts(diagnosis)}{_files(diagnosis)}"),
            *(("note", ALIKE) for cause in diagnosis.findings if cause.alike),
            *(("note", note) for note in diagnosis.notes),
        ),
        tables=(
            SummaryTable(
                header=("cause", "probability", "meaning", "evidence", "next"),
                rows=tuple(
                    (
                        " or ".join((cause.cause, *cause.alike)),
                        f"{100 * cause.probability:.0f} %",
                        cause.meaning,
                        cause.evidence,
                        cause.next_test,
                    )
                    for cause in diagnosis.findings
                ),
            ),
        )
        if diagnosis.findings
        else (),
    )


@summarize.register
def _(audit: Audit) -> Summary:
    faults = [finding.sentence for finding in audit.findings if finding.severity in FAULTS]  # the worst first
    return Summary(
        headline=faults[0] if faults else f"value: {audit.value}; gradient: {audit.gradient or 'none'}",
        facts=(
            ("function", Name(audit.target)),
            ("called", audit.summary),
            ("taken as", audit.place),
            *(("verdict", sentence) for sentence in audit.verdict),
        ),
        tables=(
            SummaryTable(
                header=("finding", "severity", "what was seen", "where"),
                rows=tuple(
                    (finding.kind, finding.severity, finding.sentence, finding.where)
                    for finding in audit.findings
                ),
            ),
        )
        if audit.findings
        else (),
    )


@summarize.register
def _(training: TrainingResult) -> Summary:
    return Summary(
        headline=f"{training.algorithm}, after step {training.steps}"
        + _held_out_clause(training.held_out)
        + (f"; stopped: {training.stopped}" if training.stopped is not None else ""),
        facts=(
            *((("policy", Name(training.policy)),) if training.policy else ()),
            *((("best checkpoint", Name(training.best)),) if training.best is not None else ()),
            ("folder", Name(training.out)),
            *((f"weights of the {role} in memory", dtype) for role, dtype in training.dtypes.items()),
        ),
        tables=(
            SummaryTable(
                header=("metric of the last step", "value", "unit"),
                rows=tuple(
                    (
                        name,
                        with_error(number_of(training.metrics, name))
                        if f"{name}_error" in training.metrics
                        else f"{training.metrics[name]:.6g}",
                        metric_of(name).unit.replace("none", "") + per_what(name, training.target_per),
                    )
                    # the main numbers of a report first
                    for name in dict.fromkeys((*(n for n in METRICS if METRICS[n].card), *training.metrics))
                    if name in training.metrics and not name.endswith("_error") and not name.startswith(OTHER)
                ),
            ),
        ),
        warnings=(
            *(
                (f"earlier alerts, which are in steps.jsonl: {len(training.alerts) - MAX_LISTED}",)
                if len(training.alerts) > MAX_LISTED
                else ()
            ),
            *training.alerts[-MAX_LISTED:],
        ),
    )


def _held_out_clause(held_out: Mapping[str, float]) -> str:
    """The reward and the KL of the last evaluation with their standard errors; empty without one."""
    names = (
        ("last held-out reward", "eval/reward", ""),
        ("KL", "eval/kl_per_sequence", " nats per sequence"),
    )
    return "".join(
        f"; {label} {with_error(number_of(held_out, name))}{unit}"
        for label, name, unit in names
        if name in held_out
    )
