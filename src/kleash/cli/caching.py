"""Running ``kleash cache`` and printing its summary."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from kleash.cli.progress import Progress
from kleash.cli.terminal import Terminal, remark, say
from kleash.jobs import CacheJob
from kleash.jobs.reading import READ_OPTIONS
from kleash.launch_environment import require_one_process
from kleash.reports.formatting import format_bytes
from kleash.store import CacheContents, WrittenLogits
from kleash.store.cache import read_label


def run_cache(job: CacheJob) -> int:
    """Run ``kleash cache`` and return its exit code, 0.

    Raises:
        KleashError: if the job fails.
    """
    require_one_process("kleash cache")
    from kleash.measuring import cache_reference
    from kleash.measuring.progress import ProgressReporter
    from kleash.measuring.reference_cache import default_cache

    job = replace(job, out=job.out if job.out is not None else default_cache())
    if job.quiet:
        contents = cache_reference(job, ProgressReporter())
    else:
        with Progress(activity="caching", step="reading") as progress:
            contents = cache_reference(job, progress)
    if job.json:
        sys.stdout.write(contents.to_json())
    elif isinstance(contents, WrittenLogits):
        print_written(contents, quiet=job.quiet)
    elif not job.quiet:
        print_cache(contents, job)
    return 0


def print_written(written: WrittenLogits, *, quiet: bool) -> None:
    """Print what was written into a file of base logits, and the command that uses it."""
    if quiet:
        return
    console, noun = Terminal(), "chunk" if written.chunks == 1 else "chunks"
    for note in written.notes:
        remark(console, "note", note, "dim")
    say(
        console,
        f"wrote {written.chunks} {noun} of {written.context} tokens over {written.vocabulary} logits to "
        f"{written.path}: {written.bytes:,} bytes",
    )
    say(console, f"use it with: kleash measure --policy MODEL --reference-cache {shlex.quote(written.path)}")


def print_cache(contents: CacheContents, job: CacheJob) -> None:
    """Print the size of a cache, its ratio to that of the logits, and the command that uses it."""
    console = Terminal()
    ratio = contents.logits_bytes / contents.hidden_bytes
    say(
        console,
        f"{contents.tokens:,} tokens in {contents.sequences:,} sequences are cached in {job.out}: "
        f"{format_bytes(contents.hidden_bytes)} of hidden states, {ratio:.0f} times less than their logits, and a "
        f"head of {format_bytes(contents.head_bytes)}",
    )
    say(console, f"use it with: {measure_command(job)}")


def measure_command(job: CacheJob) -> str:
    """The command that measures a policy against the cache, with the options that must agree."""
    kind, path = job.measurement().source
    shared_options = (
        "revision_reference",
        "dtype",
        "device_map",
        "batch_tokens",
        "window",
        "stride",
        "limit",
        "temperature",
        *READ_OPTIONS,
    )
    if job.from_hidden_states is not None:
        job = replace(job, dtype=read_label(Path(str(job.out)).expanduser()).reference.dtype)
    default_job = CacheJob()
    changed_options = [name for name in shared_options if getattr(job, name) != getattr(default_job, name)]
    option_words = [
        word for name in changed_options for word in (f"--{name.replace('_', '-')}", str(getattr(job, name)))
    ]
    words = [
        "--reference",
        job.reference,
        f"--{kind}",
        path,
        *option_words,
        "--reference-cache",
        str(job.out),
    ]
    return f"kleash measure --policy POLICY {shlex.join(words)}"
