"""The ranks that store the weights of a network between them."""

from dataclasses import dataclass
from typing import Any

import torch

from kleash.errors import KleashError
from kleash.linear.head_storage import all_gather_numbers, raise_together


@dataclass(frozen=True, eq=False)
class ShardStorage:
    """The ranks that store the weights of a network between them."""

    group: Any
    """Process group of the ranks."""
    param_dtype: torch.dtype | None
    """The dtype in which the weights are gathered, by FSDP's mixed precision; None for their own."""
    device: torch.device

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return torch.distributed.get_world_size(self.group)

    def cast(self, weight: Any) -> Any:
        """A weight, detached and in the dtype in which it is gathered."""
        with torch.inference_mode(False), torch.no_grad():
            weight = weight.detach()
            is_cast = self.param_dtype is not None and weight.is_floating_point()
            return weight.to(self.param_dtype) if is_cast else weight

    def raise_together(self, error: KleashError | None) -> None:
        """Raise if any rank has an error. A collective.

        Raises:
            KleashError: ``error``, if there is one.
            CannotRunError: if another rank has one.
        """
        errors = all_gather_numbers(self.group, self.device, [int(error is not None)])[0]
        ranks = torch.distributed.get_process_group_ranks(self.group)
        raise_together(errors, error, ranks, "the ranks that store the model")
