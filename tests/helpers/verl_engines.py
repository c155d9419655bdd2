"""verl's own FSDP engine on a CPU, around tiny models, also on two ranks; batches as its v1 trainer hands them on."""

from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kleash.auditing.targets.packages import quiet
from kleash.integrations.verl import REFERENCE_HIDDEN, install

VOCABULARY = 13
PROMPTS, RESPONSES = (2, 3, 1, 2), (3, 1, 4, 2)
TEMPERATURE = 1.25


class Float64Angles(torch.nn.Module):
    """Rotary angles in float64: transformers' are float32, whose last bit depends on how rows are packed."""

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("inverse_frequencies", inverse_frequencies.double(), persistent=False)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every angle, twice beside each other."""
        angles = (position_ids[..., None] * self.inverse_frequencies).repeat(1, 1, 2)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def tiny(seed: int, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A Llama of 8 dimensions whose distributions are not flat, and which computes in its dtype throughout.

    transformers has rotary angles, the softmax of eager attention and norms in float32, whose last bit depends on
    how rows are packed and on the processor.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, initializer_range=0.6, attn_implementation="sdpa", **more)
    model = LlamaForCausalLM(config)
    model.model.rotary_emb = Float64Angles(model.model.rotary_emb.inv_freq)
    for owner in (model.model, *model.model.layers):
        for name in ("norm", "input_layernorm", "post_attention_layernorm"):
            if hasattr(owner, name):
                setattr(owner, name, torch.nn.RMSNorm(config.hidden_size, config.rms_norm_eps))
    return model.to(dtype)


def engine_of(fsdp: Any, module: Any, *, forward_only: bool = False, shard: bool = False) -> Any:
    """verl's engine, whose model was made here; with ``shard``, wrapped by verl's own FSDP2 code."""
    with quiet():
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig

        config = FSDPEngineConfig(
            strategy="fsdp2", use_torch_compile=False, mixed_precision={"param_dtype": "fp32"}
        )
        model = SimpleNamespace(
            use_remove_padding=True, lora_rank=0, hf_config=module.config, enable_activation_offload=False
        )
        made = fsdp.FSDPEngineWithLMHead(model, config, FSDPOptimizerConfig(lr=1.0), CheckpointConfig())
        made._autocast_dtype = torch.float32
        made.module = made._build_fsdp_module(module) if shard else module
        object.__setattr__(config, "forward_only", forward_only)
    return made


def nested(rows: list[Tensor]) -> Tensor:
    """Rows of different lengths, as verl packs them."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Four sequences; one token in the middle of a response does not count."""
    from tensordict import TensorDict
    from verl.utils.tensordict_utils import assign_non_tensor

    random = torch.Generator().manual_seed(3)
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    ids = [torch.randint(VOCABULARY, (n,), generator=random) for n in lengths]
    masks = [torch.ones(r) for r in RESPONSES]
    masks[2][1] = 0
    data = TensorDict(
        {
            "input_ids": nested(ids),
            "position_ids": nested([torch.arange(n) for n in lengths]),
            "prompts": nested([x[:p] for x, p in zip(ids, PROMPTS, strict=True)]),
            "responses": nested([x[p:] for x, p in zip(ids, PROMPTS, strict=True)]),
            "response_mask": nested(masks),
            "loss_mask": nested(masks),
            "old_log_probs": nested([torch.zeros(r, dtype=dtype) for r in RESPONSES]),
            "ref_log_prob": nested([torch.full((r,), -1.0, dtype=dtype) for r in RESPONSES]),
            "advantages": nested([torch.randn(r, generator=random, dtype=dtype) for r in RESPONSES]),
        },
        batch_size=[len(lengths)],
    )
    given = {"use_remove_padding": True, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    assign_non_tensor(data, **{"temperature": TEMPERATURE, "global_batch_size": 4, **given, **settings})
    return data


def loss_of(losses: Any, **settings: Any) -> Any:
    """verl's ``ppo_loss`` as its actor binds it."""
    from verl.workers.config import ActorConfig

    given = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "exact", **settings}
    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, **given)
    return partial(losses.ppo_loss, config=config)


def logp_of(model: Any, ids: Tensor) -> Tensor:
    """log p of every next token, one sequence at a time, without any of verl's packing."""
    return (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)


COEFFICIENT = 0.3


def counted(data):
    """Token ids, response length and mask of each sequence."""
    return zip(data["input_ids"].unbind(), PROMPTS, RESPONSES, data["response_mask"].unbind(), strict=True)


def kl_and_logp(policy, reference, data):
    """Exact KL and log-probability of every response token, sequence by sequence; the mask beside them."""
    kls, logps, masks = [], [], []
    for ids, prompt, response, mask in counted(data):
        p, q = logp_of(policy, ids), logp_of(reference, ids).detach()
        rows = slice(prompt - 1, prompt + response - 1)
        kls.append((p.exp() * (p - q)).sum(-1)[rows])
        logps.append(p[rows].gather(-1, ids[prompt:, None])[:, 0])
        masks.append(mask.bool())
    return kls, logps, masks


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def expected_update(policy, reference, data, mode="token-mean"):
    """Gradient and KL of the whole loss, computed apart: policy gradient at ratio 1, plus the exact KL."""
    kls, logps, masks = kl_and_logp(policy, reference, data)
    advantages = data["advantages"].unbind()
    per = {"token-mean": sum(map(torch.sum, masks)), "seq-mean-token-sum": len(masks)}[mode]
    kl = sum((k * m).sum() for k, m in zip(kls, masks, strict=True)) / per
    gain = sum(
        ((x - x.detach()).exp() * a * m).sum() for x, a, m in zip(logps, advantages, masks, strict=True)
    )
    policy.zero_grad()
    (COEFFICIENT * kl - gain / per).backward()
    found = gradients(policy)
    policy.zero_grad()
    return found, kl.item()


def on_policy(policy, data):
    """Old log-probabilities that are the policy's own: every ratio is 1."""
    _, logps, _ = kl_and_logp(policy, policy, data)
    data["old_log_probs"] = nested([x.detach() for x in logps])
    return data


def import_verl():
    """Install kleash with the exact KL, then import verl's engine and losses."""
    with quiet():
        install(exact=True)
        for name in ("verl.workers.engine.fsdp.transformer_impl", "verl.workers.utils.losses"):
            __import__(name)


def check_two_ranks(rank):
    """verl's FSDP2 trains the exact KL of the whole batch, of which each rank has half, as of the weights."""
    import verl.workers.engine.fsdp.transformer_impl as fsdp
    import verl.workers.utils.losses as losses
    from verl.plugin.platform import get_platform
    from verl.utils.tensordict_utils import chunk_tensordict

    platform = type(get_platform())
    platform.current_device, platform.device_name = (lambda self: "cpu"), "cpu"
    policy, reference = tiny(0, torch.float32), tiny(1, torch.float32)
    alone, whole = (deepcopy(policy), deepcopy(reference)), batch(torch.float32, micro_batch_size_per_gpu=1)
    expected, nats = expected_update(*alone, on_policy(alone[0], whole))
    own = chunk_tensordict(whole, 2)[rank]
    engine = engine_of(fsdp, reference, forward_only=True, shard=True)
    own[REFERENCE_HIDDEN] = engine.infer_batch(deepcopy(own))["model_output"][REFERENCE_HIDDEN]
    engine = engine_of(fsdp, policy, shard=True)
    out = engine.forward_backward_batch(own, loss_of(losses))
    for name, parameter in engine.module.named_parameters():
        assert len(parameter.to_local()) < len(parameter), "a shard"
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=2e-4, atol=2e-6)
    dist.all_reduce(mean := torch.tensor(out["metrics"]["kl_loss"].aggregate()))
    torch.testing.assert_close(mean.item() / 2, nats, rtol=1e-5, atol=0)
