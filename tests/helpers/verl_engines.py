"""verl's own FSDP engine on a CPU, around tiny models; batches as its v1 trainer hands them on."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kleash.auditing.targets.packages import quiet

VOCABULARY = 13
PROMPTS, RESPONSES = (2, 3, 1, 2), (3, 1, 4, 2)
TEMPERATURE = 1.25


def tiny(seed: int) -> Any:
    """A Llama of 8 dimensions whose distributions are not flat."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.6, attn_implementation="sdpa")).double()


def engine_of(fsdp: Any, module: Any, *, forward_only: bool = False) -> Any:
    """verl's engine, whose model was made here."""
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
        made.module = module
        object.__setattr__(config, "forward_only", forward_only)
    return made


def nested(rows: list[Tensor]) -> Tensor:
    """Rows of different lengths, as verl packs them."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(**settings: Any) -> Any:
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
            "old_log_probs": nested([torch.zeros(r, dtype=torch.float64) for r in RESPONSES]),
            "ref_log_prob": nested([torch.full((r,), -1.0, dtype=torch.float64) for r in RESPONSES]),
            "advantages": nested([torch.randn(r, generator=random, dtype=torch.float64) for r in RESPONSES]),
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
