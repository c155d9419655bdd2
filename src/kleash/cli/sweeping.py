"""Running ``kleash sweep`` and printing its ranking."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from kleash.cli.formats import print_formatted
from kleash.cli.progress import Progress
from kleash.cli.summary import print_gates, print_table
from kleash.cli.terminal import Terminal, remark, say, terminal_sentence, trackers_as_sentences
from kleash.jobs import SweepJob
from kleash.launch_environment import launched_rank
from kleash.reports.attribution import (
    added_warnings,
    describe_attribution,
    describe_control,
    describe_sum,
    format_share,
    largest_first,
    name_of_candidate,
    names_of_candidates,
    shown_attributions,
)
from kleash.reports.formatting import format_bytes
from kleash.reports.sweep import PAGE, describe_ranking, format_bits, warnings_of_candidates
from kleash.store.attribution import Attribution
from kleash.store.number import cells
from kleash.store.statistics import label_of
from kleash.store.sweep import QUANTILE, Sweep

EXIT_FAILED = 2
"""Exit code if a candidate could not be measured, or its KL not attributed."""
MAX_GROUPS = 12
"""Groups of weights that the terminal lists."""


def run_sweep(job: SweepJob) -> int:
    """Run ``kleash sweep`` and return its exit code: 2 if a candidate or an attribution failed, otherwise that of the
    gate of ``--at-most``, or 0.

    It is 0 if another process makes the ranking.

    Raises:
        KleashError: if the sweep cannot be made.
    """
    from kleash.measuring.run import require_folder_of_all
    from kleash.measuring.sweep_run import default_sweep, sweep_together

    if job.out is None:
        require_folder_of_all("the sweep")
        job = replace(job, out=default_sweep())
    shows_progress = launched_rank() == 0 and not job.quiet
    with trackers_as_sentences(), Progress() if shows_progress else nullcontext() as progress:
        shared = sweep_together(job, progress)
    if not shared.is_own:
        return 0
    result = shared.sweep
    if job.output_format is not None:
        print_formatted(result, job.output_format)
    elif not job.quiet:
        print_sweep(result, Path(str(job.out)) / PAGE)
    if job.quiet or job.output_format is not None:
        for candidate in result.failed:
            print(f"kleash: {candidate.name} could not be measured: {candidate.failure}", file=sys.stderr)
        for attribution in shown_attributions(result):
            if attribution.failure:
                sentence = describe_attribution(attribution, name_of_candidate(result, attribution))
                print(f"kleash: {terminal_sentence(sentence)}", file=sys.stderr)
    is_attributed = not any(attribution.failure for attribution in result.attributions)
    if not is_attributed or result.failed:
        return EXIT_FAILED
    return 0 if result.gate is None else result.gate.exit_code


def print_sweep(sweep: Sweep, page: Path) -> None:
    """Print the ranking with letters, the candidates that failed, and the path of the page."""
    console = Terminal()
    console.print()
    say(console, describe_ranking(sweep), style="bold")
    if sweep.ranking:
        letters = "; candidates that share a letter are tied" if sweep.pairs else ""
        say(console, f"{sweep.tokens:,} tokens in {sweep.clusters:,} clusters{letters}", style="dim")
        print_table(console, _table(sweep))
    for warning in (*sweep.warnings, *warnings_of_candidates(sweep)):
        remark(console, "warning", warning)
    for candidate in sweep.failed:
        remark(console, "not measured", f"{candidate.name}: {candidate.failure}", "red")
    for attribution in shown_attributions(sweep):
        _print_attribution(console, sweep, attribution)
    print_gates(sweep)
    say(console, f"page: {page}")


def _print_attribution(console: Terminal, sweep: Sweep, attribution: Attribution) -> None:
    """Print what a candidate's KL comes from: the groups with the largest parts, their sum, and the control."""
    sentence = describe_attribution(attribution, name_of_candidate(sweep, attribution))
    say(console, terminal_sentence(sentence), style="bold")
    if not attribution.has_changes:
        for warning in added_warnings(sweep, attribution):
            remark(console, "warning", warning)
        return
    say(
        console,
        f"{attribution.tokens:,} tokens in {attribution.clusters:,} clusters, one group of weights swapped at a time",
        style="dim",
    )
    table = Table(box=None, pad_edge=False)
    for heading in (
        attribution.grouping,
        "change",
        "simultaneous 95 % interval",
        "share of the KL",
        "weights",
    ):
        table.add_column(
            heading, justify="left" if heading == attribution.grouping else "right", no_wrap=True
        )
    groups = largest_first(attribution)
    for group in groups[:MAX_GROUPS]:
        value, interval, _, unit = cells(group.simultaneous_change)
        table.add_row(
            group.name,
            f"{value} {unit}",
            "identical" if group.is_identical else interval or "unknown",
            terminal_sentence(format_share(attribution, group)),
            f"{group.parameters:,}",
        )
    print_table(console, table)
    if len(groups) > MAX_GROUPS:
        say(console, f"{len(groups) - MAX_GROUPS} other groups are on the page", style="dim")
    for sentence in filter(None, (describe_sum(attribution), describe_control(attribution))):
        say(console, terminal_sentence(sentence))
    for warning in added_warnings(sweep, attribution):
        remark(console, "warning", warning)


def _table(sweep: Sweep) -> Table:
    """The table of the candidates, the smallest mean first."""
    table = Table(box=None, pad_edge=False)
    headings = (
        "",
        "",
        label_of(sweep.rank_by),
        "95 % interval",
        f"{QUANTILE} % of tokens",
        *map(label_of, sweep.other_direction),
        "size",
        "bits a weight",
        "",
        *(() if sweep.gate is None else (f"at most {sweep.gate.at_most:g}",)),
    )
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    names = names_of_candidates(sweep)
    for candidate in sweep.ranking:
        value, interval, _, unit = cells(candidate.numbers[sweep.rank_by])
        quantile = candidate.numbers.get(f"{sweep.rank_by}_{QUANTILE}")
        table.add_row(
            names[candidate.number],
            candidate.letters,
            f"{value} {unit}",
            interval or "unknown",
            "" if quantile is None else cells(quantile)[0],
            *(cells(candidate.numbers[name])[0] for name in sweep.other_direction),
            format_bytes(candidate.bytes_on_disk),
            format_bits(candidate),
            "Pareto front" if candidate.is_on_pareto_front else "",
            *(() if candidate.gate is None else (candidate.gate.verdict,)),
        )
    return table
