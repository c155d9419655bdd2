"""The verdict of a gate: whether a KL is at most a limit, as it stands in the files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kleash.store.statistics import KL_DIRECTIONS, STATISTICS

EXIT_CODES = {"passed": 0, "failed": 1, "undecided": 3}
"""Verdict -> exit code of a command."""


QUANTITIES: Mapping[str, str] = {
    **{f"per_token.{name}": f"{STATISTICS[name].label} per token" for name in KL_DIRECTIONS},
    "kl_engine_trainer": "KL(engine ‖ trainer) per token",
}
"""Quantity of a gate -> its name in sentences."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict of ``--at-most`` on a quantity."""

    quantity: str
    """What is compared with the limit, a key of ``QUANTITIES``: "per_token.kl_reference_policy"."""
    at_most: float
    """The limit, in nats."""
    verdict: str
    """"passed", "failed" or "undecided"."""

    @property
    def label(self) -> str:
        """What is compared with the limit, in words."""
        return QUANTITIES.get(self.quantity, self.quantity)

    @property
    def exit_code(self) -> int:
        """0 if passed, 1 if failed, 3 if undecided."""
        return EXIT_CODES.get(self.verdict, EXIT_CODES["undecided"])


@dataclass(frozen=True, kw_only=True)
class Gate(Verdict):
    """Whether a KL is at most the limit of ``--at-most``, with the numbers that decided it."""

    value: float
    """The estimate, in nats."""
    ci95: tuple[float, float]
    """Its 95 % interval."""
    noise_floor: float | None
    """The size of rounding errors, which is added to both ends of the interval; None if it was not measured, and then
    nothing is added."""
    clusters: int
    tokens: int
    verdict: str
    """"passed": the upper end plus the noise floor is at most the limit, with at least 30 clusters. "failed": the lower
    end minus the noise floor is above it. "undecided": neither."""
    more_tokens: int | None = None
    """Of an undecided gate, about how many more tokens would decide it; None if no number of tokens is known to."""


@dataclass(frozen=True, kw_only=True)
class SweepGate(Verdict):
    """The smallest candidate of a sweep whose KL is at most the limit of ``--at-most``."""

    verdict: str
    """"passed": ``smallest`` is. "failed": no candidate is within the limit. "undecided": one of ``undecided``, or else
    ``smallest``, is."""
    smallest: int | None
    """Number of the candidate that takes the fewest bytes of those that passed, and of equal ones the nearest to the
    reference; None if none passed. Candidates of unknown size come last."""
    undecided: tuple[int, ...]
    """Numbers of the undecided candidates that are smaller than that, the smallest first."""


def exit_code_of(gates: Iterable[Verdict]) -> int:
    """The exit code for several gates: 1 if any failed, else 3 if any is undecided, else 0."""
    codes = {gate.exit_code for gate in gates}
    return next((code for code in (EXIT_CODES["failed"], EXIT_CODES["undecided"]) if code in codes), 0)
