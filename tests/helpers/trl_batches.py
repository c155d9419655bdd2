"""Trainers on a tiny Llama and batches made by hand, for tests of what is put in front of TRL."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

PROMPT, TIME, PAD = 4, 7, 2
TRL_MARKS = [
    pytest.mark.peers("trl"),
    # What TRL and PEFT read that transformers has renamed.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


def score(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between responses."""
    return [len(set(text)) / 10 for text in completions]


def config(kind: Any, folder: Path, **more: Any) -> Any:
    """A small configuration, silent and on the CPU."""
    settings = {"output_dir": str(folder), "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    settings |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1}
    settings |= {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": TIME}
    settings |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_steps": 2, "beta": 0.3}
    return kind(**{**settings, "seed": 5, **more})


def make(
    trainer: Any,
    kind: Any,
    model: Any,
    folder: Path,
    *,
    config_of: dict[str, Any] | None = None,
    said: list[str] | None = None,
    **more: Any,
) -> Any:
    """A trainer of ``model`` (a folder, or a network), that was not run; ``said`` gets the warnings of making it."""
    from datasets import Dataset

    prompts = Dataset.from_dict(
        {"prompt": ["the sea was", "she counted", "a long road", "when the rain"] * 4}
    )
    # peft still reads attributes that transformers has renamed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = trainer(
            model=model,
            reward_funcs=more.pop("reward_funcs", [score]),
            args=config(kind, folder, **(config_of or {})),
            train_dataset=more.pop("train_dataset", prompts),
            **more,
        )
    if said is not None:
        said += [str(warning.message) for warning in caught]
    made.current_gradient_accumulation_steps = made.args.gradient_accumulation_steps
    made.model.train()
    return made


def batch(*, rows: int = 4, tools: bool = True, seed: int = 3) -> dict[str, Tensor]:
    """Prompts padded on the left, responses on the right; some of the tokens are a tool's."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 300, (rows, PROMPT + TIME), generator=draw)
    prompt_mask = torch.ones(rows, PROMPT, dtype=torch.long)
    prompt_mask[1, :2] = 0
    completion_mask = torch.ones(rows, TIME, dtype=torch.long)
    completion_mask[0, 5:] = 0
    completion_mask[2, 1:] = 0
    ids = torch.where(torch.cat([prompt_mask, completion_mask], 1) == 1, ids, PAD)
    made = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": prompt_mask,
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": completion_mask,
        "advantages": torch.linspace(-1, 1.5, rows),
    }
    if tools:
        made["tool_mask"] = torch.ones_like(completion_mask)
        made["tool_mask"][3, 2:4] = 0
    made["num_items_in_batch"] = (completion_mask * made.get("tool_mask", 1)).sum()
    return made


def counted(inputs: dict[str, Tensor]) -> Tensor:
    """Where a response's own tokens are."""
    return (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def texts(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and attention mask of prompts with responses."""
    return tuple(
        torch.cat([inputs[f"prompt_{what}"], inputs[f"completion_{what}"]], 1) for what in ("ids", "mask")
    )


def whole_logp(network: Any, inputs: dict[str, Tensor], temperature: float) -> Tensor:
    """Log-probabilities of the whole vocabulary at the positions that predict the response: [batch, time, vocab]."""
    ids, mask = texts(inputs)
    logits = network(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return (logits[:, inputs["prompt_ids"].size(1) - 1 : -1] / temperature).log_softmax(-1)


def moved(network: Any, by: float, seed: int = 1) -> Any:
    """The network with noise on its weights."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(by * weight.std().nan_to_num(0) * torch.randn(weight.shape, generator=draw))
    return network


def gradients(loss: Tensor, network: Any) -> list[Tensor]:
    """Of the loss, in all weights that are trained."""
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    return list(torch.autograd.grad(loss, weights, allow_unused=True))


def logged(trainer: Any, name: str) -> float:
    """The mean of what was noted under ``name`` in training, as it is when the trainer logs."""
    trainer._log_kl_rows()
    noted = trainer._metrics["train"][name]
    return sum(noted) / len(noted)
