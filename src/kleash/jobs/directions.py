"""The two directions of the KL: which one is the headline of a result, and which one a gate limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kleash.errors import OptionError
from kleash.jobs.option_groups import require_limit, require_word
from kleash.jobs.reading import SourceKind

DIRECTIONS: Mapping[str, str] = MappingProxyType(
    {"policy-reference": "kl_policy_reference", "reference-policy": "kl_reference_policy"}
)
"""Word of ``--direction`` -> name of the KL in ``STATISTICS``; the model that is named first is averaged over."""
DIRECTION_OF_SWEEPS = "reference-policy"


def headline_of(source: SourceKind) -> str:
    """The name in ``STATISTICS`` of the KL that is the headline of a measurement.

    On text, where a quantised or merged model is compared with the original, it averages over the reference's next
    tokens, as the KLD of llama.cpp; on responses, over those of the policy, which is what a trained policy pays for.

    Args:
        source: kind of the measurement's source.
    """
    return DIRECTIONS["reference-policy" if source == "text" else "policy-reference"]


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """The limit of a gate, and the KL that it limits."""

    at_most: float | None = None
    """A limit in nats for the KL per token. Exit code 0 if the upper end of its interval plus the noise floor is not
    above the limit, 1 if the lower end minus the noise floor is above it, otherwise 3, and how many more tokens would
    decide. Never 0 below 30 clusters."""
    direction: str | None = None
    """The KL that --at-most limits: policy-reference averages over the policy's next tokens, reference-policy over the
    reference's. If not given, that of the headline: reference-policy with --text, otherwise policy-reference."""

    def check_gate(self) -> None:
        """Check the limit and the direction; raises OptionError."""
        require_limit(self.at_most)
        if self.direction is not None:
            require_word("--direction", self.direction, tuple(DIRECTIONS))
            if self.at_most is None:
                raise OptionError("--direction says which KL --at-most limits; add that, or leave it out")

    @property
    def gated_statistic(self) -> str | None:
        """The name in ``STATISTICS`` of the KL of ``direction``; None for that of the headline."""
        return None if self.direction is None else DIRECTIONS[self.direction]
