"""Running ``kleash logits`` and printing its summary."""

import math
import sys

from kleash.cli.formats import print_formatted
from kleash.cli.terminal import Terminal, remark, say
from kleash.jobs import LogitsJob
from kleash.launch_environment import require_one_process
from kleash.store import LogitsMeasurement, Number, WrittenLogits
from kleash.store.statistics import label_of
from kleash.store.summary_tables import summarize


def run_logits(job: LogitsJob) -> int:
    """Run ``kleash logits`` and return its exit code, 0.

    Raises:
        KleashError: if the job fails.
    """
    require_one_process("kleash logits")
    from kleash.measuring import measure_base_logits, write_base_logits

    result = write_base_logits(job) if job.policy is None else measure_base_logits(job)
    if isinstance(result, WrittenLogits) and job.output_format == "json":
        sys.stdout.write(result.to_json())
    elif isinstance(result, LogitsMeasurement) and job.output_format is not None:
        print_formatted(result, job.output_format)
    elif not job.quiet:
        console = Terminal()
        for note in result.notes:
            remark(console, "note", note, "dim")
        print_logits(console, result)
        for warning in summarize(result).warnings if isinstance(result, LogitsMeasurement) else ():
            remark(console, "warning", label_of(warning))
    return 0


def print_logits(console: Terminal, result: LogitsMeasurement | WrittenLogits) -> None:
    """Print llama.cpp's statistics and kleash's, or what was written."""
    if isinstance(result, WrittenLogits):
        noun = "chunk" if result.chunks == 1 else "chunks"
        say(
            console,
            f"wrote {result.chunks} {noun} of {result.context} tokens over {result.vocabulary} logits to "
            f"{result.path}: {result.bytes:,} bytes",
        )
        say(console, f"use it with: kleash logits {result.path} --policy MODEL")
        return
    if result.llama_cpp:
        console.print(result.llama_cpp, markup=False, highlight=False, soft_wrap=True)
        console.print()
    console.print(
        "====== kleash: bounds for 16 bits a logit, errors clustered by chunk ======", highlight=False
    )
    numbers = result.per_token
    for title, name in (
        ("KL(base ‖ policy)", "kl_reference_policy"),
        ("KL(policy ‖ base)", "kl_policy_reference"),
    ):
        lower, upper = numbers[f"{name}_lower"], numbers[f"{name}_upper"]
        console.print(
            f"{title}: between {lower.value:.6f} and {upper.value:.6f}, {_error(lower)} nats a token",
            highlight=False,
            soft_wrap=True,
        )
    for title, name in (
        ("llama.cpp's KLD", "llama_cpp_kld"),
        ("ln(PPL(Q)/PPL(base))", "log_perplexity_ratio"),
        ("same likeliest token", "top1_agreement"),
    ):
        number = numbers[name]
        console.print(f"{title}: {number.value:.6f} {_error(number)}", highlight=False, soft_wrap=True)
    noun = "chunk" if result.chunks == 1 else "chunks"
    console.print(f"{result.tokens} tokens in {result.chunks} {noun} of {result.context}", highlight=False)


def _error(number: Number) -> str:
    """The standard error of a number, which one chunk does not have."""
    return f"± {'unknown' if math.isnan(number.standard_error) else f'{number.standard_error:.6f}'}"
