"""Two processes that store the weights of tiny models between them by FSDP2, and have prompts of their own.

``OMP_NUM_THREADS=1 sharded_ranks.py STORE FOLDER [CHECK …]``: rank N writes the result of each check, or its traceback,
into ``FOLDER/rank-N.json``. The models lie in FOLDER; ``make_models`` writes them.
"""

import json
import os
import re
import sys
import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import trl_training_ranks
import verl_driver_ranks
from forked_ranks import fork_ranks
from tiny_models import save_tiny, tiny_adapter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, AutoTokenizer
from undrawn_charts import draw_charts

from kleash.errors import KleashError
from kleash.integrations.trainer import DriftMonitor
from kleash.jobs import MeasureJob
from kleash.linear import Head, LinearOptions, token_statistics, token_statistics_and_top
from kleash.measuring import measure
from kleash.models import Sampling, live_model
from kleash.store import Measurement

VOCAB_SIZE = 320
HEAD_SIZE = VOCAB_SIZE * 32
PROMPTS = ["the sea was calm", "she counted the birds", "a long road leads out of the town"]
SAMPLING = Sampling(max_new_tokens=3, samples_per_prompt=2, temperature=0.8)
KINDS = ("llama", "gpt2", "gemma2")
"""Architectures: a head of its own; another layout of layers; a tied head, a scaled embedding and a softcap."""
ZERO3_KINDS = {"llama": {}, "qwen3": {"vocab_size": 321}}
"""The same for ZeRO-3, with configurations; the rows of the tied head are shared unevenly."""
PRELOADED = ("functorch.compile", "transformers.models.llama.modeling_llama", "trl.trainer.grpo_trainer")
PRELOADED += ("kleash.integrations.trl", "kleash.training.with_trl.response_recorder", "trl_batches")
MEASURED = "measured"
"""Folder of the runs of checks."""
FSDP2 = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}  # as Accelerate has it
KEEP_GOING = bool(os.environ.get("KEEP_GOING"))
CHECKS = {}


def check(function, checks=CHECKS):
    checks[function.__name__] = function
    return function


def make_models(folder, kinds=None):
    """Policy and reference of each architecture, and an adapter."""
    for kind, config in (kinds or {name: {} for name in (*KINDS, "qwen3")}).items():
        for role, seed in (("policy", 1), ("reference", 2)):
            save_tiny(folder / f"{kind}-{role}", kind, seed=seed, **config)
    tiny_adapter(folder / "adapter", folder / "llama-policy")


def reported(folder, done):
    """What each of two ranks of a script like this one, which has ended, reports of its checks."""
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), done.stderr[-9000:]  # nanobind reports leaks at exit
    return [json.loads(file.read_text()) for file in files]


class Ranks:
    """This process, and the folder of the models."""

    loss_cases = (
        ("GRPO", "llama", False, {"reshard_after_forward": True}, {"reshard_after_forward": False}),
        ("GRPO", "qwen3", False, {"reshard_after_forward": True}),
        ("RLOO", "llama", False, {"reshard_after_forward": True}),
        ("GRPO", "llama", True, {"reshard_after_forward": True}),
    )
    """Algorithm, kind, whether the second rank has no token, and each way to shard."""
    dtype, bound = torch.float64, 1e-6
    """A policy's, and its gradient's largest error: how sums of float32 round depends on the processor."""
    training = ("llama", {"fsdp": True, "fsdp_config": FSDP2}, "FSDPLlamaForCausalLM")
    """Kind, arguments of TRL's configuration, and the class that they make of the model."""

    def __init__(self, rank, folder):
        self.rank, self.folder = rank, folder
        self.mesh = init_device_mesh("cpu", (2,))

    def network(self, name):
        return AutoModelForCausalLM.from_pretrained(self.folder / name).eval()

    def wrapped(self, network, **more):
        """A network with a unit for each layer and one for the rest, as FSDP2's tutorial shards it."""
        return shard(network, mesh=self.mesh, **more)

    def sharded(self, name, **more):
        made = self.wrapped(self.network(name), **more)
        return getattr(made, "module", made)  # of DeepSpeed's engine

    def backward(self, model, loss, is_last):
        loss.backward()

    def gradient(self, parameter):
        return parameter.grad.full_tensor()

    def whole(self, parameter):
        return parameter.full_tensor()

    def tokenizer(self, name):
        return AutoTokenizer.from_pretrained(self.folder / name)

    def drift(self, policy, reference, *, alone=False, kind="llama", **more):
        """What a DriftMonitor measures: all prompts on the first process, which tells the other, if ``alone``."""
        if alone and self.rank:
            dist.broadcast_object_list(told := [None])
            return told[0]
        settings = {"prompts": PROMPTS, "sampling": SAMPLING, "batch_tokens": 200, **more}
        monitor = DriftMonitor(reference=reference, **settings)
        processes = {"process_index": 0 if alone else self.rank, "num_processes": 1 if alone else 2}
        monitor.trainer = SimpleNamespace(
            accelerator=SimpleNamespace(unwrap_model=lambda x: x, **processes),
            callback_handler=SimpleNamespace(callbacks=[]),
            args=None,
            model=policy,
            processing_class=self.tokenizer(f"{kind}-policy"),
        )
        with mock.patch("accelerate.utils.gather_object", list) if alone else nullcontext():
            measured = monitor.measure()
        if alone:
            dist.broadcast_object_list([measured])
        return measured


def shard(network, *, mesh, layers=True, **more):
    base = network.get_base_model() if hasattr(network, "get_base_model") else network
    blocks = base.transformer.h if hasattr(base, "transformer") else base.model.layers
    for layer in blocks if layers else ():
        fully_shard(layer, mesh=mesh, **more)
    return fully_shard(network, mesh=mesh, **more)


@contextmanager
def largest_message():
    """The largest number of elements that a rank receives in one call of each collective."""
    names = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
    names = tuple(name for name in (*names, "all_to_all_single", "all_reduce") if hasattr(dist, name))
    originals = {name: getattr(dist, name) for name in names}
    functional = torch.ops._c10d_functional.all_gather_into_tensor
    sizes = Counter()

    def counted(name):
        def call(tensor, *args, **kwargs):
            sizes[name] = max(sizes[name], tensor.numel())
            return originals[name](tensor, *args, **kwargs)

        return call

    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is functional.default:
                sizes["full_tensor"] = max(sizes["full_tensor"], result.numel())
            return result

    for name in names:
        setattr(dist, name, counted(name))
    try:
        with Dispatched():
            yield sizes
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@contextmanager
def small_messages():
    """``largest_message``; at the end, none has half the size of the head."""
    with largest_message() as sizes:
        yield sizes
    assert max(sizes.values()) < HEAD_SIZE / 2, sizes


def same(one, other, tolerance=1e-6):
    for unit in ("token", "sequence"):
        a, b = one.per(unit), other.per(unit)
        assert abs(a.value - b.value) <= tolerance * max(1.0, abs(a.value)), (unit, a, b)
        errors = a.standard_error, b.standard_error
        assert np.allclose(*errors, rtol=0.01, atol=tolerance, equal_nan=True), (a, b)
    assert (one.sequences, one.tokens) == (other.sequences, other.tokens)


@check
def drift_of_sharded_models_equals_that_of_one_process(ranks):
    """With small batches, no message has the size of the head."""
    for kind in KINDS:
        whole = ranks.network(f"{kind}-policy"), ranks.network(f"{kind}-reference")
        alone = ranks.drift(*whole, alone=True, kind=kind)
        assert alone.per_token.value > 0.01
        sharded = ranks.sharded(f"{kind}-policy"), ranks.sharded(f"{kind}-reference")
        if kind != "llama":
            same(alone, ranks.drift(*sharded, kind=kind))
            continue
        assert sharded[0].lm_head.weight.numel() == HEAD_SIZE
        with small_messages() as sizes:
            same(alone, ranks.drift(*sharded, batch_tokens=20))
        assert sizes["full_tensor"] >= 32 * 48, "the counters see something"
        assert max(sizes[name] for name in sizes if "all_gather" in name) > 0


@check
def a_rank_without_prompts_takes_part(ranks):
    kind = "llama"
    whole = ranks.network("llama-policy"), ranks.network("llama-reference")
    alone = ranks.drift(*whole, alone=True, prompts=PROMPTS[:1])
    sharded = ranks.sharded("llama-policy"), ranks.sharded("llama-reference")
    same(alone, ranks.drift(*sharded, prompts=PROMPTS[:1]))
    same(alone, ranks.drift(sharded[0], whole[1], prompts=PROMPTS[:1]))  # only one of both is sharded
    same(alone, ranks.drift(whole[0], sharded[1], prompts=PROMPTS[:1], kind=kind))


@check
def an_adapter_over_a_sharded_base_is_measured(ranks):
    from peft import PeftModel

    def adapted():
        network = ranks.network("llama-policy")
        return PeftModel.from_pretrained(network, ranks.folder / "adapter", is_trainable=True)

    alone = ranks.drift(adapted().eval(), None, alone=True, prompts=PROMPTS[:2])
    assert alone.per_token.value > 0.01
    policy = adapted().train()
    ranks.wrapped(policy)
    trained = {name for name, x in policy.named_parameters() if x.requires_grad}
    same(alone, ranks.drift(policy, None, prompts=PROMPTS[:2]))
    assert {name for name, x in policy.named_parameters() if x.requires_grad} == trained and policy.training


@check
def compiled_networks_are_measured_as_they_are_written(ranks):
    """What ``torch.compile`` wraps, as TrainingArguments' ``torch_compile`` does, and what it compiles in place."""

    def compiled_modules(network):
        for number, layer in enumerate(network.model.layers):
            network.model.layers[number] = torch.compile(layer, backend="eager")
        network.lm_head = torch.compile(network.lm_head, backend="eager")
        network.model.embed_tokens = torch.compile(network.model.embed_tokens, backend="eager")
        return network

    def compiled_in_place(network):
        for module in (network, network.lm_head, *network.model.layers):
            module.compile(backend="eager")
        return network

    whole = ranks.network("llama-policy"), ranks.network("llama-reference")
    alone = ranks.drift(*whole, alone=True, prompts=PROMPTS[:2])
    for compiled in (partial(torch.compile, backend="eager"), compiled_in_place):
        pair = [compiled(ranks.sharded(f"llama-{role}")) for role in ("policy", "reference")]
        with small_messages():
            same(alone, ranks.drift(*pair, batch_tokens=20, prompts=PROMPTS[:2]))
    network = shard(compiled_modules(ranks.network("llama-policy")), mesh=ranks.mesh)  # in the other order
    same(alone, ranks.drift(network, whole[1], prompts=PROMPTS[:2]))


@check
def measuring_between_steps_changes_no_gradient(ranks):
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(ranks.rank))
    gradients = []
    for measured in (False, True):
        policy = ranks.sharded("qwen3-policy", reshard_after_forward=not measured).train()
        for _ in range(2):
            if measured:
                ranks.drift(policy, ranks.network("qwen3-reference"), kind="qwen3", prompts=PROMPTS[:2])
            policy(input_ids=ids, labels=ids).loss.backward()
        gradients.append([x.grad.full_tensor() for x in policy.parameters()])
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


@check
def mixed_precision_is_that_of_the_forward_pass(ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.no_grad():
        half = ranks.network("llama-policy").bfloat16(), ranks.network("llama-reference").bfloat16()
    alone = ranks.drift(*half, alone=True)
    sharded = [ranks.sharded(f"llama-{role}", mp_policy=policy) for role in ("policy", "reference")]
    # Sums of other lengths are rounded to bfloat16 in the same places, and norms may not be.
    same(alone, ranks.drift(*sharded), 1e-2)


check(trl_training_ranks.exact_loss_of_trl_equals_that_of_one_process)
check(trl_training_ranks.a_training_run_of_trl_equals_that_of_one_process)


@check
def one_measurement_of_models_on_two_ranks_equals_that_of_one_process(ranks):
    """Claimed shards and turns under FSDP; mirrored calls under tensor parallelism, with a second load in bfloat16."""
    prompts = ranks.folder / "prompts.txt"
    if ranks.rank == 0:
        prompts.write_text("\n".join(2 * PROMPTS))
    settings = {"prompts": str(prompts), "samples_per_prompt": 1, "max_new_tokens": 3, "batch_tokens": 12}
    for kind, dtype, limit in (("llama", "float64", 6), ("qwen3", "bfloat16", 3)):
        models = {role: str(ranks.folder / f"{kind}-{role}") for role in ("policy", "reference")}
        settings |= {"dtype": dtype, "limit": limit, "out": str(ranks.folder / MEASURED / f"{kind}-one")}
        job = MeasureJob(**models, **settings)
        if ranks.rank == 0:
            measure(job)
        dist.barrier()
        alone = Measurement.read(ranks.folder / MEASURED / f"{kind}-one")
        for device_map in ("fsdp", "tensor"):
            out = str(ranks.folder / MEASURED / f"{kind}-{device_map}")
            result = measure(replace(job, device_map=device_map, out=out))
            assert result.counts.shards == alone.counts.shards
            if dtype == "float64":
                assert result.counts == alone.counts and alone.counts.shards > 2
                assert any("no tokens is not computed" in note for note in result.notes)
                for name, number in result.per_token.items():
                    assert np.isclose(alone.per_token[name].value, number.value, rtol=1e-6, atol=1e-9), name
            assert (result.dtype_gap is None) == (alone.dtype_gap is None or device_map == "fsdp")


@check
def ranks_with_other_buffers_gather_the_same_blocks(ranks):
    """The smallest buffer of all ranks decides; a rank without tokens has the default one."""
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(VOCAB_SIZE, 32, generator=generator), torch.randn(4, 32, generator=generator)
    lm_head = torch.nn.Linear(32, VOCAB_SIZE, bias=False)
    lm_head.weight = torch.nn.Parameter(weight.clone())
    stored = Head(fully_shard(lm_head, mesh=ranks.mesh).weight)
    mine = slice(0, 4) if ranks.rank == 0 else slice(0, 0)
    options = LinearOptions(buffer_bytes=2**17) if ranks.rank == 0 else None
    token_ids = torch.arange(4)[mine]
    whole, shared = (
        token_statistics_and_top(
            hidden[mine], head, hidden[mine] + 1, head, token_ids, top=3, options=options
        )
        for head in (Head(weight), stored)
    )
    assert torch.allclose(whole.statistics.kl_pq, shared.statistics.kl_pq, rtol=1e-4, atol=1e-5)
    assert torch.equal(whole.top_p.token_ids, shared.top_p.token_ids)


@check
def what_cannot_be_done_is_refused_on_all_ranks(ranks):
    network = ranks.network
    hybrid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    whole = network("llama-reference")
    columns = ranks.sharded("llama-policy", shard_placement_fn=lambda x: Shard(x.dim() - 1))
    mixed = network("llama-policy")
    for layer, dtype in zip(mixed.model.layers, (torch.bfloat16, torch.float32), strict=True):
        fully_shard(layer, mesh=ranks.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    refused = {
        "device meshes of the shapes": shard(network("llama-policy"), mesh=hybrid),
        "shard it by rows": columns,
        "by the mixed precision of its modules": fully_shard(mixed, mesh=ranks.mesh),
    }
    for use_orig_params in (False, True):
        options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
        fsdp1 = FullyShardedDataParallel(network("llama-policy"), **options)
        refusal_of(lambda fsdp1=fsdp1: ranks.drift(fsdp1.module, whole), "is measured with FSDP2")
    for words, policy in refused.items():
        refusal_of(lambda policy=policy: ranks.drift(policy, whole), words)
    nan = network("llama-policy")
    with torch.no_grad():
        nan.model.norm.weight.fill_(torch.nan)
    sharded = shard(nan, mesh=ranks.mesh)
    refusal_of(lambda: ranks.drift(sharded, whole), "NaN|has stopped|cannot be run|does not come")
    policy = ranks.sharded("llama-policy")
    hidden, token_ids = torch.randn(3, 32), torch.zeros(3, dtype=torch.long)
    head = Head(policy.lm_head.weight)
    for temperature in (0.5 + ranks.rank, torch.ones(3) if ranks.rank else 1.0):
        given = (hidden, head, hidden + 1, head, token_ids)
        asked = partial(token_statistics, *given, temperature=temperature)
        refusal_of(asked, "disagree on the temperature")
    one_in_training = ranks.sharded("llama-policy").train(ranks.rank == 0)
    asked = partial(live_model, one_in_training, ranks.tokenizer("llama-policy"))
    refusal_of(asked, "training mode|refuses its arguments")


@check
def driver_steps_of_verl_equal_those_of_one_process(ranks):
    for mode in verl_driver_ranks.CASES:
        verl_driver_ranks.check_driver(ranks.folder, mode)


def refusal_of(call, words):
    try:
        call()
    except KleashError as error:
        assert re.search(words, str(error)), error
    else:
        raise AssertionError(f"nothing was refused: {words}")


def import_what_checks_use():
    """Import what the checks import when they need it, before the ranks fork."""
    for name in PRELOADED:
        import_module(name)
    draw_charts(False)


def main(rank, store, folder, only, checks=CHECKS, kind=Ranks):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # Accelerate asks for it, and uses none
    options = {"init_method": f"file://{store}", "timeout": timedelta(minutes=10)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **options)
    from accelerate import PartialState

    PartialState(cpu=True)
    results = {}
    ranks = kind(rank, folder)
    for name, function in checks.items():
        if only and name not in only:
            continue
        try:
            results[name] = function(ranks)
        except Exception:
            results[name] = traceback.format_exc()
            if not KEEP_GOING:
                break
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))
    if not any(isinstance(x, str) for x in results.values()):
        dist.destroy_process_group()


if __name__ == "__main__":
    import_what_checks_use()
    verl_driver_ranks.import_verl()
    store, models, *only = sys.argv[1:]
    main(fork_ranks(2, [store, Path(models) / MEASURED]), store, Path(models), only)
