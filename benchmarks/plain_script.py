"""A script that compares two models without kleash: both models' logits, and two KLs of each document.

    python benchmarks/plain_script.py POLICY REFERENCE --text documents.jsonl
    python benchmarks/plain_script.py POLICY REFERENCE --prompts prompts.jsonl --max-new-tokens 128

Batches of like length, float32, ``log_softmax`` of both models' logits, KL in both directions over the whole
vocabulary, the mean of each document and the standard error over documents. With ``--prompts``, responses are generated
by transformers' ``generate`` first. There is no noise floor, no quantiles and no report, and it cannot be resumed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from harness import parser_of
from transformers import AutoModelForCausalLM, AutoTokenizer

Ids = list[int]


def generate_responses(
    policy: Any, tokenizer: Any, prompts: list[Ids], options: argparse.Namespace
) -> list[tuple[Ids, int]]:
    """The token ids of each prompt with a sampled response, and the length of the prompt."""
    sequences = []
    for start in range(0, len(prompts), options.generated_at_once):
        batch = prompts[start : start + options.generated_at_once]
        padded = tokenizer.pad({"input_ids": batch}, padding_side="left", return_tensors="pt")
        generated = policy.generate(
            **padded,
            do_sample=True,
            top_k=0,
            max_new_tokens=options.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )[:, padded["input_ids"].shape[1] :]
        for prompt, response in zip(batch, generated.tolist(), strict=True):
            end = tokenizer.eos_token_id
            length = response.index(end) + 1 if end in response else len(response)
            sequences.append((prompt + response[:length], len(prompt)))
    return sequences


def divergences(
    policy: Any, reference: Any, sequences: list[tuple[Ids, int]], at_once: int
) -> list[tuple[float, float, int]]:
    """KL(policy || reference) and KL(reference || policy) per token, and the number of tokens, of each response."""
    means: dict[int, tuple[float, float, int]] = {}
    order = sorted(range(len(sequences)), key=lambda place: -len(sequences[place][0]))
    for start in range(0, len(order), at_once):
        batch = order[start : start + at_once]
        longest = len(sequences[batch[0]][0])
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, place in enumerate(batch):
            ids[row, : len(sequences[place][0])] = torch.tensor(sequences[place][0])
        logp = policy(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        logq = reference(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        difference = logp - logq
        forward = (logp.exp() * difference).sum(-1)
        backward = -(logq.exp() * difference).sum(-1)
        for row, place in enumerate(batch):
            tokens, prompt = sequences[place]
            scored = slice(prompt - 1, len(tokens) - 1)
            means[place] = (
                forward[row, scored].mean().item(),
                backward[row, scored].mean().item(),
                len(tokens) - prompt,
            )
    return [means[place] for place in range(len(sequences))]


def main() -> None:
    """Compare two models and print the numbers as JSON."""
    parser = parser_of(__doc__, max_new_tokens=128, at_once=4, generated_at_once=32)
    parser.add_argument("policy")
    parser.add_argument("reference")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--prompts", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.policy)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        for name in (options.policy, options.reference)
    )
    with torch.inference_mode():
        if options.text is not None:
            texts = [json.loads(line)["text"] for line in options.text.read_text().splitlines()]
            sequences = [(ids, 1) for ids in tokenizer(texts)["input_ids"]]
        else:
            texts = [json.loads(line)["prompt"] for line in options.prompts.read_text().splitlines()]
            sequences = generate_responses(policy, tokenizer, tokenizer(texts)["input_ids"], options)
        each = divergences(policy, reference, sequences, options.at_once)
    forward, backward, tokens = torch.tensor(each, dtype=torch.float64).unbind(1)
    result: dict[str, float] = {"tokens": int(tokens.sum()), "documents": len(each)}
    for name, means in (("kl_policy_reference", forward), ("kl_reference_policy", backward)):
        result[name] = float((means * tokens).sum() / tokens.sum())
        result[f"{name}_per_document"] = float(means.mean())
        result[f"{name}_standard_error"] = float(means.std() / len(means) ** 0.5)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
