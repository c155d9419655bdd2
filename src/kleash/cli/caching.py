"""``kleash cache``, carried out, and what is said at its end."""

import shlex
import sys
from dataclasses import replace

from kleash.cli.progress import Progress
from kleash.cli.terminal import Terminal, say
from kleash.jobs import CacheJob
from kleash.store import CacheContents

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def run_cache(job: CacheJob) -> int:
    """Do what ``job`` says; 0 when it is done.

    Raises:
        KleashError: if it cannot be done.
    """
    from kleash.measuring import NullProgressReporter, cache_reference, default_cache

    job = replace(job, out=job.out if job.out is not None else default_cache())
    if job.quiet:
        contents = cache_reference(job, NullProgressReporter())
    else:
        with Progress(doing="caching", step="reading") as progress:
            contents = cache_reference(job, progress)
    if job.json:
        sys.stdout.write(contents.to_json())
    elif not job.quiet:
        print_cache(contents, job)
    return 0


def print_cache(contents: CacheContents, job: CacheJob) -> None:
    """How much there is, how much smaller than logits, and how it is used."""
    console = Terminal()
    times = contents.logits_bytes / contents.hidden_bytes
    say(
        console,
        f"{contents.tokens:,} tokens in {contents.sequences:,} sequences are cached in {job.out}: "
        f"{in_bytes(contents.hidden_bytes)} of hidden states, {times:.0f} times less than their logits, and a head "
        f"of {in_bytes(contents.head_bytes)}",
    )
    say(console, f"use it with: {usage(job)}")


def usage(job: CacheJob) -> str:
    """The command that measures a candidate against the cache."""
    kind, path = job.measurement().source
    same = (
        "revision_reference",
        "dtype",
        "device_map",
        "batch_tokens",
        "window",
        "stride",
        "limit",
        "temperature",
    )
    plain = CacheJob()
    changed_options = [name for name in same if getattr(job, name) != getattr(plain, name)]
    more = [
        word for name in changed_options for word in (f"--{name.replace('_', '-')}", str(getattr(job, name)))
    ]
    words = ["--reference", job.reference, f"--{kind}", path, *more, "--reference-cache", str(job.out)]
    return f"kleash measure --policy POLICY {shlex.join(words)}"


def in_bytes(size: int) -> str:
    """A size in words."""
    unit, name = next((unit_and_size for unit_and_size in UNITS if size >= unit_and_size[0]), UNITS[-1])
    return f"{size / unit:,.1f} {name}"
