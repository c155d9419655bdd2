"""Peak memory of a rank where ranks share the weights: FSDP2 and tensor parallelism, with 1, 2 and 4 processes.

    python benchmarks/sharded_memory.py                       # some minutes on two cores, 3 GB of memory
    python benchmarks/sharded_memory.py --part head --vocabulary 8192 --dim 64 --ranks 1 2   # a trial

Each rank is a process of its own (gloo). The part "head" makes one call with two heads of which a rank has its rows:

    loss (fsdp)     linear_kl_loss and its gradient, each rank with its own tokens: tokens are moved
    rows (fsdp)     token_statistics_and_top, likewise: blocks of rows are gathered
    loss (tensor)   linear_kl_loss and its gradient, all ranks with the same tokens

The figure is the kernel's high-water mark of resident memory during the call (VmHWM, reset before it) less the resident
memory before it, the largest of the ranks. Beside it stand the share of a head (rows of one head in bytes), what the
call may take (the gradient of the share, ``buffer_bytes``, and a block of a 32nd part of it), and a whole head.

The part "measure" runs ``kleash measure`` on two random models with a large vocabulary, in one process and with
--device-map fsdp and tensor: from loading the models to the report, less the memory after the imports.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import RESULTS, peak_of, write_result

from kleash.linear import Head, linear_kl_loss, token_statistics_and_top
from kleash.linear.chunked import CPU_BYTES

CALLS = ("loss (fsdp)", "rows (fsdp)", "loss (tensor)")
MAPS = ("fsdp", "tensor")
WARM_UP_TOKENS = 2
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def local_head(args: argparse.Namespace, rank: int, seed: int, *, trained: bool) -> torch.Tensor:
    """This rank's rows of a head."""
    rows = args.vocabulary // args.world_size
    torch.manual_seed(seed * 1000 + rank)
    weight = torch.empty(rows, args.dim).normal_(std=args.dim**-0.5)
    return weight.requires_grad_(trained)


def one_head(args: argparse.Namespace, rank: int) -> dict[str, float]:
    """The peak of one call on this rank, in MB."""
    name, world_size = args.call, args.world_size
    shares = [local_head(args, rank, seed, trained=seed == 1 and "loss" in name) for seed in (1, 2)]
    if world_size == 1:
        heads = [Head(share) for share in shares]
    elif "tensor" in name:
        heads = [Head(share, vocabulary_group=dist.group.WORLD) for share in shares]
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (world_size,))
        heads = [Head(DTensor.from_local(share, mesh, [Shard(0)], run_check=False)) for share in shares]
    torch.manual_seed(7 if "tensor" in name else 7 + rank)
    tokens = args.tokens if "tensor" in name else args.tokens // world_size
    hidden = [torch.randn(tokens, args.dim) for _ in range(2)]

    def call(count: int) -> None:
        p, q = (states[:count] for states in hidden)
        if "loss" in name:
            linear_kl_loss(p, heads[0], q, heads[1], weights=torch.ones(len(p))).loss.backward()
            shares[0].grad = None
        else:
            ids = torch.zeros(len(p), dtype=torch.long)
            token_statistics_and_top(p, heads[0], q, heads[1], ids, top=5)

    call(WARM_UP_TOKENS)
    ctypes.CDLL(None).malloc_trim(0)
    weights = sum(share.numel() * 4 for share in shares) / 1e6
    return {"peak": peak_of(lambda: call(tokens)), "weights": round(weights, 1)}


def one_measurement(args: argparse.Namespace, rank: int) -> dict[str, float]:
    """The peak of a measurement on this rank, in MB."""
    import transformers.models.llama.modeling_llama  # noqa: F401 (its import is no memory of the run)

    from kleash.jobs import MeasureJob
    from kleash.measuring import measure

    folder = Path(args.folder)
    prompts = folder / "prompts.txt"
    job = MeasureJob(
        policy=str(folder / "policy"),
        reference=str(folder / "reference"),
        prompts=str(prompts),
        max_new_tokens=8,
        batch_tokens=64,
        device_map=args.call if args.world_size > 1 else None,
        out=str(folder / f"{args.call}-{args.world_size}"),
    )
    return {"peak": peak_of(lambda: measure(job))}


def make_models(folder: Path, vocabulary: int, dim: int) -> float:
    """Two random models whose heads are most of their weights; the size of one model in MB."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from kleash.shipped import shipped_folder

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    sizes = {"vocab_size": vocabulary, "hidden_size": dim, "intermediate_size": dim}
    config = LlamaConfig.from_dict({**sizes, **heads})
    tokenizer = AutoTokenizer.from_pretrained(shipped_folder("reference"))
    for role, seed in (("policy", 1), ("reference", 2)):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    (folder / "prompts.txt").write_text("".join(f"the sea was calm, and {n} birds\n" for n in range(16)))
    return round(sum(path.stat().st_size for path in (folder / "policy").glob("*.safetensors")) / 1e6, 1)


def run_ranks(options: list[str], world_size: int, folder: Path) -> dict[str, float]:
    """Run this script as so many ranks; for each figure the largest of them."""
    store = tempfile.mktemp(dir=folder)
    port = str(20_000 + os.getpid() % 20_000 + world_size)
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", __file__, *options),
                *("--world-size", str(world_size), "--rank", str(rank), "--store", store),
            ],
            env={
                **ENVIRONMENT,
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank failed: {options}")
    figures = [json.loads(text.splitlines()[-1]) for text in printed]
    return {name: max(figure[name] for figure in figures) for name in figures[0]}


def head_rows(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The part "head"."""
    whole = args.vocabulary * args.dim * 4 / 1e6
    buffer = CPU_BYTES / 1e6
    rows: list[dict[str, Any]] = []
    for call in CALLS:
        for world_size in args.ranks:
            options = ["--one", "head", "--call", call]
            for name in ("vocabulary", "dim", "tokens"):
                options += [f"--{name}", str(getattr(args, name))]
            figures = run_ranks(options, world_size, folder)
            share = whole / world_size
            allowed = (share if "loss" in call else 0.0) + buffer * 33 / 32
            row = {"call": call, "ranks": world_size, "share of a head": round(share, 1)}
            row |= {"whole head": round(whole, 1), "allowed": round(allowed, 1), **figures}
            rows.append(row)
            print("{call:14} {ranks} ranks: {peak:7.1f} MB in the call; allowed {allowed:7.1f}".format(**row))
    return rows


def measure_rows(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The part "measure"."""
    model = make_models(folder, args.vocabulary, args.dim)
    rows: list[dict[str, Any]] = []
    for call, world_size in [("alone", 1), *((name, n) for name in MAPS for n in args.ranks if n > 1)]:
        options = ["--one", "measure", "--call", call, "--folder", str(folder)]
        figures = run_ranks(options, world_size, folder)
        row = {"device map": call, "ranks": world_size, "both models": round(2 * model, 1)}
        row |= {"share": round(2 * model / world_size, 1), **figures}
        rows.append(row)
        print("{device map:14} {ranks} ranks: {peak:7.1f} MB; share {share:7.1f}".format(**row))
    return rows


def arguments() -> argparse.Namespace:
    """The options; those after ``--out`` are for the processes that this script starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["all", "head", "measure"], default="all")
    parser.add_argument("--vocabulary", type=int, default=131_072)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64, help="of all ranks together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    for name in ("one", "call", "store", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("rank", "world-size"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the parts and write ``results/sharded_memory.json``, or one rank of them."""
    args = arguments()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[argparse.Namespace, Path], list[dict[str, Any]]]] = {
        "head": head_rows,
        "measure": measure_rows,
    }
    if args.one:
        if args.one == "head":
            dist.init_process_group(
                "gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.world_size
            )
        print(
            json.dumps({"head": one_head, "measure": one_measurement}[args.one](args, args.rank)), flush=True
        )
        return
    figures: dict[str, Any] = {name: getattr(args, name) for name in ("vocabulary", "dim", "tokens")}
    figures["buffer_megabytes"] = CPU_BYTES / 1e6
    for part in parts if args.part == "all" else [args.part]:
        with tempfile.TemporaryDirectory() as folder:
            figures[part] = parts[part](args, Path(folder))
    print(f"written to {write_result('sharded_memory', figures, args.out, ['transformers'])}")


if __name__ == "__main__":
    main()
