"""Figures of the pair for its card: losses on held-out text, KL of the policy, and mean rewards."""

import math
from typing import Any

import torch
from shipped_training import language_model
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kleash.training.example_rewards import heroine

NEW_TOKENS = 128
FIRST = 8
"""Number of documents whose loss is also recorded separately, for a fast test."""


def held_out_figures(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> dict[str, float]:
    """Loss and perplexity per token and bits per character on documents, each cut to the context."""
    ids = language_model.encode(tokenizer, texts)
    nats, tokens = language_model.mean_loss(model, ids)
    characters = sum(len(tokenizer.decode(row, skip_special_tokens=True)) for row in ids)
    return {
        "nats_per_token": nats,
        "perplexity": math.exp(nats),
        "bits_per_character": nats * tokens / characters / math.log(2),
        "tokens": tokens,
    }


@torch.inference_mode()
def generate_responses(
    model: Any, tokenizer: PreTrainedTokenizerFast, prompts: list[str], seed: int
) -> list[tuple[list[int], list[int]]]:
    """Prompt ids and response ids, sampled at temperature 1."""
    torch.manual_seed(seed)
    model.eval()
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    tokens = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS)
    width = inputs["input_ids"].shape[1]
    pairs = []
    for row, real in zip(tokens.tolist(), inputs["attention_mask"].tolist(), strict=True):
        response = row[width:]
        if tokenizer.eos_token_id in response:
            response = response[: response.index(tokenizer.eos_token_id) + 1]
        pairs.append((row[width - sum(real) : width], response))
    return pairs


@torch.inference_mode()
def drift(
    policy: LlamaForCausalLM, reference: LlamaForCausalLM, pairs: list[tuple[list[int], list[int]]]
) -> dict[str, float]:
    """Exact KL both ways in nats per token of the responses, by brute force in float64."""

    def log_probabilities(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
        return model(ids).logits[0].double().log_softmax(-1)

    forth, back = [], []
    for prompt, response in pairs:
        ids = torch.tensor([prompt + response])
        positions = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        logp, logq = (log_probabilities(model, ids)[positions] for model in (policy, reference))
        forth.append((logp.exp() * (logp - logq)).sum(-1))
        back.append((logq.exp() * (logq - logp)).sum(-1))
    return {
        "kl_policy_reference": torch.cat(forth).mean().item(),
        "kl_reference_policy": torch.cat(back).mean().item(),
        "tokens": sum(map(len, forth)),
        "ended": sum(len(response) < NEW_TOKENS for _, response in pairs),
    }


def mean_reward(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[list[int], list[int]]]) -> float:
    """The mean reward of the responses."""
    responses = [str(tokenizer.decode(response, skip_special_tokens=True)) for _, response in pairs]
    return sum(heroine([], responses)) / len(responses)


def measure_pair(
    models: dict[str, LlamaForCausalLM],
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    texts: list[str],
    seed: int,
) -> dict[str, Any]:
    """All figures of the pair ``{"policy": …, "reference": …}``."""
    responses = {name: generate_responses(model, tokenizer, prompts, seed) for name, model in models.items()}
    return {
        "held_out": {name: held_out_figures(model, tokenizer, texts) for name, model in models.items()},
        "held_out_first_documents": {
            name: held_out_figures(model, tokenizer, texts[:FIRST]) for name, model in models.items()
        },
        "drift_on_the_policys_own_responses": drift(
            models["policy"], models["reference"], responses["policy"]
        ),
        "rewards": {name: mean_reward(tokenizer, pairs) for name, pairs in responses.items()},
    }
