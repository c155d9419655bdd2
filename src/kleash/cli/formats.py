"""Printing results in the formats of ``--format``."""

import sys
from dataclasses import replace
from pathlib import Path

from kleash.errors import OptionError
from kleash.reports.formatting import as_sentence, measure_command
from kleash.reports.gate_verdicts import describe_gate, describe_sweep_gate
from kleash.reports.model_card import model_card
from kleash.reports.text_formats import to_csv, to_markdown
from kleash.store import Comparison, Measurement, MismatchRecord
from kleash.store.gate import Verdict
from kleash.store.number_rows import NumericResult, number_rows
from kleash.store.summary_tables import Name, Summary, summarize
from kleash.store.sweep import Sweep


def print_formatted(result: NumericResult, output_format: str, folder: Path | None = None) -> None:
    """Print a result on standard output, and the verdicts of gates on standard error where the format has none.

    Args:
        result: what is printed.
        output_format: one of those that the job of the result allows.
        folder: the run folder of a measurement.

    Raises:
        OptionError: if the result lacks what the format needs.
        RunFolderError: if a file that the format needs is missing or damaged.
    """
    sys.stdout.write(formatted(result, output_format, folder))
    if output_format not in ("json", "markdown"):
        for sentence in gate_sentences(result):
            print(f"kleash: {sentence}", file=sys.stderr)


def formatted(result: NumericResult, output_format: str, folder: Path | None = None) -> str:
    """A result in a format; arguments and errors as for ``print_formatted``."""
    match output_format:
        case "json":
            return result.to_json()
        case "csv":
            return to_csv(number_rows(result))
        case "markdown":
            notes = tuple(map(as_sentence, gate_sentences(result)))
            return to_markdown(_summary_with_command(result), notes)
        case "model-card" if isinstance(result, Measurement):
            return model_card(result)
        case "llama.cpp" if isinstance(result, Measurement) and folder is not None:
            from kleash.measuring.llama_cpp_summary import llama_cpp_text

            return llama_cpp_text(folder)
        case _:
            raise OptionError(f"this result has no format {output_format}")


def _summary_with_command(result: NumericResult) -> Summary:
    """The summary of a result with the version of kleash and the command that repeats it, where they are recorded."""
    summary = summarize(result)
    facts = [fact for fact in summary.facts if not fact[0].startswith("gate")]  # sentences follow
    facts.append(("kleash", result.kleash))
    if isinstance(result, Measurement):
        facts.append(("command", Name(measure_command(result.job))))
    return replace(summary, facts=tuple(facts))


def gate_sentences(result: NumericResult) -> list[str]:
    """The verdicts of a result's gates, in sentences."""
    return [f"{label}: {sentence}" for label, _, sentence in gates_of(result)]


def gates_of(result: NumericResult) -> list[tuple[str, Verdict, str]]:
    """The gates of a result: a label, which names the run where there are several, the verdict, and its sentence."""
    if isinstance(result, Sweep):
        return [] if result.gate is None else [("gate", result.gate, describe_sweep_gate(result))]
    gates = [("gate", result.gate)] if isinstance(result, Measurement | MismatchRecord) else []
    if isinstance(result, Comparison):
        gates = [(f"gate, {run.name}", run.gate) for run in result.runs]
    return [(label, gate, describe_gate(gate)) for label, gate in gates if gate is not None]
