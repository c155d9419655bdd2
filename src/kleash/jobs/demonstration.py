"""The job of ``kleash train`` without an algorithm."""

from dataclasses import dataclass

from kleash.jobs.option_groups import SeedOption


@dataclass(frozen=True, kw_only=True)
class DemonstrationJob(SeedOption):
    """See what a leash does: the shipped model and a reward that is easily hacked, three times.

    Once off the leash, once on a good one, once on one that is too tight. About two minutes on two cores.
    """
