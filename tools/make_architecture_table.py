"""Try every architecture that transformers maps to a causal class; write docs/reference/architectures.md.

    $ python tools/make_architecture_table.py                    # all: about 15 minutes on one core
    $ python tools/make_architecture_table.py --only mamba llama # prints the rows of some

Each architecture is tried in a process of its own (``architecture_trial``), with limits of time and memory.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import architecture_trial

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "architectures.md"
MEMORY_LIMIT = 16 << 30
"""Bytes of address space of a trial."""
CPU_LIMIT = 120
"""Seconds of processor time of a trial."""
TIME_LIMIT = 900
"""Seconds of a trial on a busy machine."""


MEASURED = ("hidden states", "logits")
"""Outcomes of architectures that kleash measures."""


def list_architectures() -> list[str]:
    """The model types that transformers maps to a causal class, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def try_all(architectures: list[str]) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of architectures, each tried in a forked process."""
    architecture_trial.main("llama")  # so that the forks need not import what every trial does
    for architecture in architectures:
        yield try_in_fork(architecture)


def try_in_fork(architecture: str) -> dict[str, Any]:
    """The row of an architecture; ``outcome`` is "not made" if it took too much time or memory."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_trial, args=(architecture, sender))
    process.start()
    sender.close()
    row = {"architecture": architecture, "outcome": "not made", "reason": f"took more than {TIME_LIMIT} s"}
    try:
        if receiver.poll(TIME_LIMIT):
            row = receiver.recv()
    except EOFError:
        process.join()
        row["reason"] = (
            f"took more than {CPU_LIMIT} s of processor time, or {MEMORY_LIMIT >> 30} GiB ({process.exitcode})"
        )
    process.kill()
    process.join()
    return row


def _run_trial(architecture: str, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT))
    with Path(os.devnull).open("w", encoding="utf-8") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    try:
        row = architecture_trial.main(architecture)
    except BaseException as error:  # a fault of kleash shows in the table, whatever it is
        row = {
            "architecture": architecture,
            "outcome": "wrong",
            "reason": f"{type(error).__name__}: {str(error)[:300]}",
        }
    sender.send(row)


def main() -> None:
    """Try the architectures; write the page, or print the rows with --only."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="architectures to try; their rows are printed")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for row in try_all(arguments.only or list_architectures()):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if arguments.only is None:
        PAGE.write_text(make_page(rows), encoding="utf-8")


def remark(row: dict[str, Any]) -> str:
    """In brackets, what is special about an architecture that is measured."""
    remarks = [row["padding"]] if row.get("padding") else []
    remarks += ["float32 only"] if row["dtype"] == "float32" else []
    return f" ({', '.join(remarks)})" if remarks else ""


def make_page(rows: list[dict[str, Any]]) -> str:
    """The page of all rows, with the versions and the date."""
    rows = sorted(rows, key=lambda row: row["architecture"])
    made = [row for row in rows if row["outcome"] != "not made"]
    measured = [row for row in made if row["outcome"] in MEASURED]
    lines = [
        "# Architectures",
        "",
        "<!-- Made by tools/make_architecture_table.py; change that, not this page. -->",
        "",
        f"transformers {version('transformers')} maps {len(rows)} architectures to a causal class. A tiny random model",
        f"was made of {len(made)}, and kleash measured {len(measured)} of them ({len(measured) / len(made):.1%}), with",
        f"torch {version('torch')} on a CPU, {datetime.now(timezone.utc):%Y-%m-%d}.",
        "",
        "Each model is compared with a copy whose weights have moved, on prompts (with generation) and on text. The KL",
        "of every token agrees with sums over the vocabulary of the network's own logits of that sequence alone, in",
        "float64, to 1e-6 (2e-3 for those that run in float32 only). Padded batches and single ones agree likewise.",
        "[Models](models.md) explains hidden states and logits.",
        "",
    ]
    for outcome in MEASURED:
        names = [f"`{row['architecture']}`{remark(row)}" for row in measured if row["outcome"] == outcome]
        lines += [f"## Measured through {outcome}", "", ", ".join(names), ""]
    not_measured = [row for row in made if row["outcome"] not in MEASURED]
    lines += ["## Not measured", "", *failures(not_measured), "", "## Not made", ""]
    lines += [
        "transformers does not build or run a tiny model with the sizes that the tool gives it. This says nothing of",
        "published checkpoints.",
        "",
        ", ".join(f"`{row['architecture']}`" for row in rows if row["outcome"] == "not made"),
    ]
    return "\n".join(lines) + "\n"


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a table of architectures with the reason why each was not measured."""
    lines = ["| architecture | reason |", "| --- | --- |"]
    for row in rows:
        reason = row.get("reason") or (
            "differs from its own logits by up to {truth:.2g}, between batches by {alone:.2g}, and the log-probability "
            "with which a token was drawn by {drawn:.2g}"
        ).format(**row, drawn=10 * row.get("generated", 0))
        cell = " ".join(reason.replace("|", "\\|").replace("<", "&lt;").split())[:200]
        lines.append(f"| `{row['architecture']}` | {cell} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
