"""A stand-in for ``vllm serve`` that speaks what TRL's ``VLLMClient`` sends: generation, and new weights.

    python tests/helpers/vllm_server.py MODEL_FOLDER

It prints its port. An address is ``http://127.0.0.1:PORT/FAULT``; the fault is "none", "raw" (log-probabilities from
before the temperature, vLLM's default), or "stale" (weights are taken once, and later ones ignored). The paths and
fields are those of TRL 1.16's ``vllm_client.py``. NCCL's broadcast is replaced by a POST of the tensors to
``/stand_in/weights``, for which ``/update_weights`` waits, as vLLM waits in its receive.
"""

import io
import json
import queue
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Engine:
    """A model that generates, and takes weights."""

    def __init__(self, folder: str) -> None:
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.eos = self.network.config.eos_token_id
        self.arriving: queue.Queue[bytes] = queue.Queue()
        self.updates = 0
        self.draw = torch.Generator().manual_seed(0)

    def update(self, announced: dict[str, Any], fault: str) -> None:
        """Take the tensors that were announced by name, dtype and shape."""
        tensors = torch.load(io.BytesIO(self.arriving.get(timeout=60)))
        expected = zip(announced["names"], announced["dtype_names"], announced["shapes"], strict=True)
        for (name, tensor), what in zip(tensors, expected, strict=True):
            assert (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) == what
        self.updates += 1
        if fault != "stale" or self.updates == 1:
            missing = self.network.load_state_dict(dict(tensors), strict=False)
            assert not missing.unexpected_keys

    def complete(self, prompt: list[int], body: dict[str, Any], fault: str) -> dict[str, Any]:
        """A response, with the log-probability of each token."""
        temperature, ids, values = body["temperature"], list(prompt), []
        while len(ids) < len(prompt) + body["max_tokens"] and (not values or ids[-1] != self.eos):
            with torch.inference_mode():
                logits = self.network(torch.tensor([ids])).logits[0, -1].float()
            logp = (logits / temperature).log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1, generator=self.draw))
            values.append(float(logits.log_softmax(-1)[token] if fault == "raw" else logp[token]))
            ids.append(token)
        tokens = [f"token_id:{token}" for token in ids[len(prompt) :]]
        listed = [{token: value} for token, value in zip(tokens, values, strict=True)]
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": listed}
        return {
            "prompt_token_ids": prompt,
            "token_ids": ids[len(prompt) :],
            "logprobs": None if body["logprobs"] is None else logprobs,
        }


class Handler(BaseHTTPRequestHandler):
    """Answers TRL's requests."""

    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        fault, path = self.split()
        mode = "raw_logprobs" if fault == "raw" else "processed_logprobs"
        answers: dict[str, Any] = {
            "health": {},
            "v1/models": {"data": [{"id": "stand-in"}]},
            "get_world_size": {"world_size": 1},
            "server_info": {
                "vllm_config": {"weight_transfer_config": {}, "model_config": {"logprobs_mode": mode}}
            },
        }
        self.send(answers[path.partition("?")[0]])

    def do_POST(self) -> None:
        fault, path = self.split()
        content = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if path == "stand_in/weights":
            self.engine.arriving.put(content)
            return self.send({})
        body = json.loads(content or b"{}")
        if path == "init_weight_transfer_engine":
            self.engine.updates = 0
        elif path == "update_weights":
            self.engine.update(body["update_info"], fault)
        elif path == "v1/completions":
            drawn = [prompt for prompt in body["prompt"] for _ in range(body["n"])]
            return self.send({"choices": [self.engine.complete(prompt, body, fault) for prompt in drawn]})
        elif path not in ("start_weight_update", "finish_weight_update", "reset_prefix_cache"):
            return self.send({"error": path}, 404)
        return self.send({})

    def split(self) -> tuple[str, str]:
        _, fault, path = self.path.split("/", 2)
        return fault, path

    def send(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    torch.set_num_threads(1)
    Handler.engine = Engine(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
