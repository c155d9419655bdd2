"""What one of two processes whitens: its own rows, by the mean and spread of both."""

from datetime import timedelta

import torch
import torch.distributed as dist

from kleash.leash import measured_kl, whiten


def batches():
    """Values and masks: ragged with an empty row, all equal, equal on each rank, everything on one rank."""
    torch.manual_seed(0)
    values = torch.randn(5, 4, dtype=torch.float64)
    ragged = torch.arange(4) < torch.tensor([4, 1, 0, 3, 2]).unsqueeze(-1)
    one_sided = torch.zeros(5, 4, dtype=torch.bool)
    one_sided[0] = True
    return {
        "ragged": (torch.where(ragged, values, torch.nan), ragged),
        "all equal": (torch.full((5, 4), 0.1), torch.ones(5, 4, dtype=torch.bool)),
        "each rank has one number": (torch.arange(5.0).unsqueeze(-1).expand(5, 4).floor_divide(3), ~ragged),
        "one rank has nothing": (values, one_sided),
    }


def of_rank(rank, folder):
    """Rank 0 has the first three rows, rank 1 the last two."""
    dist.init_process_group("gloo", f"file://{folder}/ranks", timedelta(seconds=60), world_size=2, rank=rank)
    rows = slice(0, 3) if rank == 0 else slice(3, None)
    found = {}
    for name, (values, mask) in batches().items():
        told = measured_kl(values[rows], mask[rows]).across_ranks()
        found[name] = (whiten(values[rows], mask[rows]), told.value, told.count)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
