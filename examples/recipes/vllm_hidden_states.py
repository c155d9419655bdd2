"""Script for vLLM: the hidden states of a text or of responses, for ``kleash cache --from-hidden-states``.

Written for vLLM 0.18 or later: ``speculative_config`` with the method ``extract_hidden_states``, and
``ExampleHiddenStatesConnector`` (docs/features/speculative_decoding/extract_hidden_states.md of vLLM). Needs kleash and
vLLM::

    python vllm_hidden_states.py --model R --text corpus.txt --out states/
    kleash cache --reference R --text corpus.txt --from-hidden-states states/ --layers 36 --out cache/

It sends the tokens of each sequence to the engine as one prompt and writes the engine's log-probability of each token
to ``states/logprobs.jsonl``, so that kleash verifies every row.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from kleash.models import Loading, load_reference, read_responses, read_text

__all__ = ["save_hidden_states", "token_requests"]

REQUESTS_AT_ONCE = 256


def token_requests(
    model: str, *, text: str | None = None, responses: str | None = None
) -> Iterator[list[int]]:
    """The tokens of each sequence that ``kleash cache`` reads from a source.

    Args:
        model: folder or hub id of the reference, whose tokenizer is used. It is loaded on the CPU.
        text: as ``--text`` of ``kleash cache``, with its default window.
        responses: as ``--responses``.
    """
    pair = load_reference(model, None, Loading(device="cpu"))
    sequences = read_text(text, pair) if text is not None else read_responses(str(responses), pair)
    for sequence in sequences:
        yield [*sequence.prompt_ids, *sequence.response_ids]


def save_hidden_states(
    model: str, requests: Sequence[list[int]], out: Path, *, layers: Sequence[int], **engine: Any
) -> None:
    """Run vLLM over the requests; it writes one safetensors file for each to ``out``.

    Args:
        model: folder or hub id of the reference.
        requests: token ids.
        out: folder for the files and ``logprobs.jsonl``.
        layers: ``eagle_aux_hidden_state_layer_ids``, ascending; the last is the number of layers of the model.
        engine: further arguments of ``vllm.LLM``, such as ``tensor_parallel_size``.

    Raises:
        ModuleNotFoundError: if vLLM is not installed.
    """
    vllm: Any = import_module("vllm")
    llm = vllm.LLM(
        model=model,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(out)},
        },
        **engine,
    )
    out.mkdir(parents=True, exist_ok=True)
    sampling = vllm.SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
    with (out / "logprobs.jsonl").open("w", encoding="utf-8") as file:
        for start in range(0, len(requests), REQUESTS_AT_ONCE):
            prompts = [{"prompt_token_ids": ids} for ids in requests[start : start + REQUESTS_AT_ONCE]]
            for output in llm.generate(prompts, sampling):
                token_ids = list(output.prompt_token_ids)
                logprobs = [
                    None if entry is None else entry[token_id].logprob
                    for entry, token_id in zip(output.prompt_logprobs, token_ids, strict=True)
                ]
                file.write(json.dumps({"token_ids": token_ids, "logprobs": logprobs}) + "\n")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="hidden states of a source from vLLM")
    parser.add_argument("--model", required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text")
    source.add_argument("--responses")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config = AutoConfig.from_pretrained(options.model)
    requests = list(token_requests(options.model, text=options.text, responses=options.responses))
    depth = config.get_text_config(decoder=True).num_hidden_layers
    save_hidden_states(options.model, requests, options.out, layers=[depth])


if __name__ == "__main__":
    main()
