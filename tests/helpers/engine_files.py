"""Files of hidden states as vLLM and SGLang write them, computed with transformers alone."""

import json
from functools import lru_cache

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


@lru_cache(maxsize=8)
def _network(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def layer_outputs(folder, token_ids, dtype=torch.float32):
    """The residual stream after 0, 1, … layers, and last the normed states: [tokens, layers + 2, dim]."""
    network = _network(folder, dtype)
    outputs = []
    handles = [
        layer.register_forward_hook(lambda _m, _i, o: outputs.append(o)) for layer in network.model.layers
    ]
    handles.append(network.model.norm.register_forward_hook(lambda _m, _i, o: outputs.append(o)))
    with torch.no_grad():
        ids = torch.tensor([list(token_ids)])
        network.model(input_ids=ids, use_cache=False)
        outputs.insert(0, network.model.embed_tokens(ids))
    for handle in handles:
        handle.remove()
    tensors = [output[0] if isinstance(output, tuple) else output for output in outputs]
    return torch.stack([tensor[0] for tensor in tensors], dim=1)


def token_logps(folder, token_ids, temperature=1.0, dtype=torch.float32):
    """The log-probability of each token after those before it, None for the first."""
    with torch.no_grad():
        logits = _network(folder, dtype)(torch.tensor([list(token_ids)])).logits[0].double() / temperature
    logps = logits.log_softmax(-1)
    return [None, *(float(logps[t - 1, token]) for t, token in enumerate(token_ids) if t)]


def write_vllm(folder, model, requests, layers=(1, 2), dtype=torch.float32, change=lambda states: states):
    """A file for each request: ``hidden_states`` [tokens, layers, dim] and ``token_ids``."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, token_ids in enumerate(requests):
        states = change(layer_outputs(model, token_ids, dtype)[:, list(layers)])
        save_file(
            {"hidden_states": states.contiguous(), "token_ids": torch.tensor(list(token_ids))},
            folder / f"cmpl-{number:03}.safetensors",
        )
    return folder


def write_logps(folder, model, requests, temperature=1.0, shift=0):
    """``logprobs.jsonl`` with the log-probabilities of all requests' tokens."""
    lines = []
    for token_ids in requests:
        logps = token_logps(model, token_ids, temperature)
        logps = [None, *logps[1 + shift :], *[None] * shift]
        lines.append(json.dumps({"token_ids": list(token_ids), "logprobs": logps}))
    (folder / "logprobs.jsonl").write_text("\n".join(lines) + "\n")


def sglang_response(model, token_ids, prompt, column=-1):
    """A response of ``/generate`` whose first ``prompt`` tokens were the prompt, with ``return_logprob``."""
    states = layer_outputs(model, token_ids)[:, column].tolist()
    logps = token_logps(model, token_ids)
    entries = [[logp, token, None] for logp, token in zip(logps, token_ids, strict=True)]
    meta = {"prompt_tokens": prompt, "completion_tokens": len(token_ids) - prompt}
    meta |= {"input_token_logprobs": entries[:prompt], "output_token_logprobs": entries[prompt:]}
    meta["hidden_states"] = [states[:prompt], *states[prompt:-1]]
    return {"text": "", "output_ids": list(token_ids[prompt:]), "meta_info": meta}
