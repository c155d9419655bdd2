"""The verdict of a gate: whether a KL is at most a limit, as it stands in the files."""

from collections.abc import Iterable
from dataclasses import dataclass

EXIT_CODES = {"passed": 0, "failed": 1, "undecided": 3}
"""Verdict -> exit code of a command."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Whether a KL is at most the limit of ``--at-most``, with the numbers that decided it."""

    quantity: str
    """What is compared with the limit: "per_token.kl_policy_reference"."""
    at_most: float
    """The limit, in nats."""
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

    @property
    def exit_code(self) -> int:
        """0 if passed, 1 if failed, 3 if undecided."""
        return EXIT_CODES.get(self.verdict, EXIT_CODES["undecided"])


def exit_code_of(gates: Iterable[Gate]) -> int:
    """The exit code for several gates: 1 if any failed, else 3 if any is undecided, else 0."""
    codes = {gate.exit_code for gate in gates}
    return next((code for code in (EXIT_CODES["failed"], EXIT_CODES["undecided"]) if code in codes), 0)
