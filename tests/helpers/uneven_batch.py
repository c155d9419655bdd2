"""A ragged batch, a policy of four numbers, and what one of two processes does with its part of it."""

import gc
import json
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kleash.losses import aggregate, count_of, kl_loss
from kleash.masking import Mean


def data(rows=7, time=5, seed=0):
    """Features, reference log-probabilities and a ragged mask with an empty row."""
    torch.manual_seed(seed)
    lengths = torch.tensor([5, 1, 3, 0, 2, 5, 4])[:rows]
    mask = torch.arange(time) < lengths.unsqueeze(-1)
    features = torch.randn(rows, time, 3, dtype=torch.float64)
    return features, -torch.rand(rows, time, dtype=torch.float64), mask


def policy():
    torch.manual_seed(1)
    return torch.nn.Linear(3, 1, dtype=torch.float64)


def per_token(model, features, logq, mask):
    return kl_loss(-model(features).squeeze(-1).exp(), logq, mask)


def of_rank(rank, cut, ways, folder):
    """One of two processes: its rows in two micro-batches, gradients averaged by DDP."""
    dist.init_process_group("gloo", f"file://{folder}/ranks", timedelta(seconds=60), world_size=2, rank=rank)
    results = {}
    rows = slice(0, cut) if rank == 0 else slice(cut, None)
    features, logq, mask = (part[rows] for part in data())
    for how, options in ways.items():
        model = DistributedDataParallel(policy())
        mine = Mean(total=torch.zeros((), dtype=torch.float64), count=count_of(mask, how, **options))
        count = mine.across_ranks().count
        logged = None
        halves = [part.split([1, len(part) - 1]) for part in (features, logq, mask)]
        for i, (x, y, m) in enumerate(zip(*halves, strict=True)):
            model.require_backward_grad_sync = i == 1
            mean = aggregate(per_token(model, x, y, m), m, how, **options)
            mean.share(count, ranks=2).backward()
            logged = mean.detached if logged is None else logged + mean.detached
        shown = logged.across_ranks()
        results[how] = (shown.value.item(), model.module.weight.grad.tolist(), logged.count.item())
    (folder / f"{rank}.json").write_text(json.dumps(results))
    del model, mean  # nothing holds the group when it is destroyed
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
