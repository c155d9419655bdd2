"""``kleash cache``: its options, and what is said at its end."""

import shlex
import sys
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from kleash.cli.progress import Progress
from kleash.records import CacheContents, CacheJob

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SOURCE = tyro.conf.create_mutex_group(required=False, title="source: what the reference reads")


@dataclass(frozen=True, kw_only=True)
class Cache(CacheJob):
    """Run a reference once over text or responses and keep its final hidden states and its head.

    Any number of candidates are then measured against it with "kleash measure --reference-cache", which does
    not load the reference. Started again after an interruption, it goes on where it stopped. There is no
    --prompts: what a policy will answer cannot be read before it has. Without arguments: the reference and the
    text that ship with kleash.
    """

    text: Annotated[str | None, SOURCE] = None
    responses: Annotated[str | None, SOURCE] = None

    def __post_init__(self) -> None:
        """Leave the checks to the job, whose errors are one line."""

    def job(self) -> CacheJob:
        """The job that was asked for.

        Raises:
            OptionError: if it means nothing.
        """
        return CacheJob(**asdict(self))


def run_cache(command: Cache) -> int:
    """Do what ``command`` says; 0 when it is done.

    Raises:
        KleashError: if it cannot be done.
    """
    job = command.job()  # what means nothing is said before torch is loaded
    from kleash.measuring import Nobody, cache_reference, default_cache

    job = replace(job, out=job.out if job.out is not None else default_cache())
    if job.quiet:
        contents = cache_reference(job, Nobody())
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
    console = Console(highlight=False)
    times = contents.logits_bytes / contents.hidden_bytes
    console.print(
        f"{contents.tokens:,} tokens in {contents.sequences:,} sequences are cached in {escape(str(job.out))}: "
        f"{in_bytes(contents.hidden_bytes)} of hidden states, {times:.0f} times less than their logits, and a head "
        f"of {in_bytes(contents.head_bytes)}",
        soft_wrap=True,
    )
    console.print(f"use it with: {escape(usage(job))}", soft_wrap=True)


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
    given = [name for name in same if getattr(job, name) != getattr(plain, name)]
    more = [word for name in given for word in (f"--{name.replace('_', '-')}", str(getattr(job, name)))]
    words = ["--reference", job.reference, f"--{kind}", path, *more, "--reference-cache", str(job.out)]
    return f"kleash measure --policy POLICY {shlex.join(words)}"


def in_bytes(size: int) -> str:
    """A size in words."""
    unit, name = next((found for found in UNITS if size >= found[0]), UNITS[-1])
    return f"{size / unit:,.1f} {name}"
