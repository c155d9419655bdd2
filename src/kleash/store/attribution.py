"""The attribution of a candidate's KL to groups of its weights: what each group changes when it is swapped back."""

from dataclasses import dataclass, replace
from typing import Any

from kleash.estimate import Estimate
from kleash.store.codec import encode


@dataclass(frozen=True, kw_only=True)
class GroupChange:
    """What swapping one group of weights back to the reference's changes."""

    name: str
    """Such as "layer 3", "self_attn.q_proj", "norms" or "embeddings"."""
    parameters: int
    """Number of its weights."""
    is_identical: bool
    """Whether candidate and reference have the same weights in it, so that the change is 0 without a pass."""
    change: Estimate
    """The mean with this group swapped minus that of the candidate, paired by cluster; below 0 if the group's
    weights are a cause of the KL."""
    simultaneous_ci95: tuple[float, float]
    """The intervals of all groups hold at once with 95 % confidence."""

    @property
    def simultaneous_change(self) -> Estimate:
        """The change with the simultaneous interval in place of its own."""
        return replace(self.change, ci95=self.simultaneous_ci95)


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The changes of a candidate's KL when its weights are swapped back, one group at a time."""

    candidate: int
    """Number of the candidate."""
    grouping: str
    """"layers" or "modules"."""
    failure: str = ""
    """Why there are no numbers; empty if there are."""
    statistic: str = "kl_policy_reference"
    """The mean per token that is attributed."""
    sequences: int = 0
    tokens: int = 0
    """Scored positions of the sequences that were chosen."""
    clusters: int = 0
    mean: Estimate | None = None
    """The statistic of the candidate on these tokens."""
    groups: tuple[GroupChange, ...] = ()
    """In the order of the network."""
    sum_of_changes: Estimate | None = None
    """Of the single groups."""
    change_of_all: Estimate | None = None
    """With all groups swapped at once."""
    interaction: Estimate | None = None
    """``sum_of_changes`` minus ``change_of_all``: how far single changes are from adding up."""
    control: Estimate | None = None
    """The change of a second pass without a swap, after all others: exactly 0 where passes are repeatable."""
    critical_value: float = float("nan")
    """The 95 % quantile of the largest |t| over all groups."""
    warnings: tuple[str, ...] = ()

    @property
    def has_changes(self) -> bool:
        """Whether there are numbers of groups whose weights differ from the reference's."""
        return not self.failure and not all(group.is_identical for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, the way it stands in ``sweep.json``."""
        return encode(self)

    def share_of(self, group: GroupChange) -> float:
        """The part of the candidate's mean that is gone with this group swapped; NaN if the mean is 0."""
        value = 0.0 if self.mean is None else self.mean.value
        return 0.0 - group.change.value / value if value else float("nan")
