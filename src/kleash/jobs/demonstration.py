"""The job of ``kleash train`` without an algorithm."""

from dataclasses import dataclass

from kleash.jobs.option_groups import SeedOption


@dataclass(frozen=True, kw_only=True)
class DemonstrationJob(SeedOption):
    """See what a leash does: the shipped model and a reward that is easily hacked, three times.

    Once without a KL penalty, once with a suitable one, once with one that is too strong. Less than
    three minutes of processor time.
    """
