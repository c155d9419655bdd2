"""A small inference server that answers as vLLM and SGLang do, with faults on request.

    python tests/helpers/inference_server.py MODEL_FOLDER

It prints its port. An address is ``http://127.0.0.1:PORT/DIALECT/FAULT/v1``: the dialect is "vllm", "sglang", "llama"
or "proxy" (vLLM's answers behind another owner); the fault is a name of ``FAULTS``, or "none". A fault with
a number, "500-2", occurs in the first so many requests of that address. The shapes are those of vLLM 0.33
(``logprobs.py`` and ``entrypoints/openai``) and SGLang 0.5.23 (``tokenizer_manager.py`` and
``logprob_result_processor.py``).
"""

import json
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FAULTS = (
    "truncated", "429", "500", "401", "400", "html", "nested", "counts", "nan", "logits", "hang",
    "texts", "foreign", "fewer", "later", "redirect", "close", "models", "nomodels",
    "swapped", "retrained", "reflected", "full", "adapter", "renamed", "rounded",
    "negative", "choices", "zeros", "endless", "stale",
)  # fmt: skip
"""What may go wrong. "later" is one failure in the sixth request, after which a server that is "retrained" has another
model; one that is "swapped" has it from the fifth on. "models" and "nomodels" are about the list; "full" refuses what
is longer than its context. "renamed" swaps the texts of two tokens, "zeros" leaves 30 tokens a probability, "stale" has
a row that was not computed. "adapter" (a second model over the first) is no fault."""
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama": "llamacpp", "proxy": "someone"}
ZERO = -9999.0
RENAMED = {2001: 2002, 2002: 2001}
CONTEXT = 40
"""Of a server with the fault "full"; the probe is shorter."""


class Model:
    """Next-token log-probabilities of a checkpoint, and its tokenizer."""

    def __init__(self, folder: str) -> None:
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.lock = threading.Lock()
        self.name = Path(folder).name
        self.log_probabilities = lru_cache(maxsize=256)(self._log_probabilities)

    def _log_probabilities(self, ids: tuple[int, ...]) -> torch.Tensor:
        with self.lock, torch.inference_mode():
            return torch.log_softmax(self.network(torch.tensor([ids])).logits[0].float(), dim=-1)


class Server(ThreadingHTTPServer):
    """Serves one model."""

    daemon_threads = True

    def __init__(self, model: Model) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = model
        self.requests: Counter[str] = Counter()
        self.in_flight = self.most_in_flight = 0
        self.counting = threading.Lock()
        self.keys: list[str | None] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up."""


class Handler(BaseHTTPRequestHandler):
    """Answers requests of every dialect."""

    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/seen":
            seen = {"most_in_flight": self.server.most_in_flight, "keys": self.server.keys}
            return self.send(200, {**seen, "requests": self.server.requests})
        dialect, fault, path = self.split()
        if path != "/v1/models":
            return self.send(404, {"error": "no such path"})
        if fault == "nomodels":
            return self.send(404, {"detail": "Not Found"})
        name = self.server.model.name
        entry: dict[str, Any] = {"id": name, "object": "model", "owned_by": OWNERS[dialect]}
        if dialect in ("vllm", "sglang", "proxy"):
            length = CONTEXT if fault == "full" else 400
            entry |= {"created": 1, "root": name, "parent": None, "max_model_len": length}
        more = {
            "models": [{**entry, "id": "other"}],
            "adapter": [{**entry, "id": "lora", "root": "/lora", "parent": name, "max_model_len": None}],
        }
        entries = [entry, *more.get(fault, [])]
        return self.send(200, {"object": "list", "data": entries})

    def do_POST(self) -> None:
        dialect, fault, path = self.split()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.counting:
            self.server.requests[self.address] += 1
            count = self.server.requests[self.address]
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
            self.server.keys.append(self.headers["Authorization"])
        try:
            fault, _, times = fault.partition("-")
            if times and count > int(times):
                fault = "none"
            if fault in ("later", "retrained"):
                after = "other" if fault == "retrained" and count > 6 else "none"
                fault = "500" if count == 6 else after
            if fault == "swapped":
                fault = "other" if count > 4 else "none"
            if not self.fail(fault):
                answer = self.answer(dialect, fault, path, body)
                if answer is not None:
                    self.send(200, answer, fault)
        except BrokenPipeError:
            pass
        finally:
            with self.server.counting:
                self.server.in_flight -= 1

    def split(self) -> tuple[str, str, str]:
        _, dialect, fault, *rest = self.path.split("/")
        self.address = f"/{dialect}/{fault}"
        return dialect, fault, "/" + "/".join(rest)

    def fail(self, fault: str) -> bool:
        """Send an error and return True, if ``fault`` is one."""
        key = self.headers["Authorization"]
        if fault in ("429", "500"):
            self.send(int(fault), {"error": {"message": f"\x1b[31mbusy {key}"}}, retry_after="7")
        elif fault in ("400", "401"):
            self.send(int(fault), {"object": "error", "message": f"no, \x1b[31m{key}"})
        elif fault in ("html", "nested"):
            self.send_bytes(200, b"<html>gateway</html>" if fault == "html" else b"[" * 100_000)
        elif fault == "redirect":
            self.send_response(307)
            self.send_header("Location", f"https://elsewhere.example/v1?key={quote(str(key))}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif fault == "hang":
            time.sleep(20)
        elif fault == "close":
            self.close_connection = True
        elif fault == "reflected":
            self.send(200, {"choices": key, "meta_info": key})
        elif fault == "endless":
            self.send_chunks([b"100000\r\n" + bytes(2**20) + b"\r\n"] * 40)
        else:
            return False
        return True

    def send(self, status: int, value: Any, fault: str = "none", retry_after: str | None = None) -> None:
        content = json.dumps(value).encode()
        if fault == "truncated":
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        else:
            self.send_bytes(status, content, retry_after)

    def send_chunks(self, chunks: list[bytes]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(ConnectionError):
            for chunk in chunks:
                self.wfile.write(chunk)

    def send_bytes(self, status: int, content: bytes, retry_after: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self.wfile.write(content)

    def answer(self, dialect: str, fault: str, path: str, body: Mapping[str, Any]) -> Any:
        if dialect in ("vllm", "proxy") and path == "/v1/completions":
            requested = len(body["prompt"]) + body["max_tokens"]
            if fault == "full" and requested > CONTEXT:
                return self.send(400, {"error": {"message": f"{requested} tokens exceed {CONTEXT}"}})
            return self.vllm("other" if body["model"] == "lora" else fault, body)
        if dialect == "sglang" and path == "/generate":
            return self.sglang("other" if body.get("lora_path") == "lora" else fault, body)
        return {"choices": [{"text": ""}]}

    def rows(self, fault: str, ids: list[int]) -> torch.Tensor:
        logp = self.server.model.log_probabilities(tuple(ids))
        if fault == "other":
            return torch.log_softmax(0.8 * logp, dim=-1)
        if fault == "zeros":
            least = logp.topk(30).values[:, -1:]
            return torch.log_softmax(logp.masked_fill(logp < least, -math.inf), dim=-1)
        return logp + {"logits": 3, "negative": -40}.get(fault, 0)

    def value(self, fault: str, logp: torch.Tensor) -> float:
        number = round(float(logp), 3) if fault == "rounded" else float(logp)
        if fault == "nan":
            return math.nan
        return ZERO if number == -math.inf else number

    def text(self, fault: str, token: int) -> str:
        if fault == "renamed":
            token = RENAMED.get(token, token)
        return "wrong" if fault == "texts" else self.server.model.tokenizer.decode([token])

    def vllm(self, fault: str, body: Mapping[str, Any]) -> Any:
        """A row has the prompt's token with its rank, then the likeliest; a token that is both has its place there."""
        ids, top = body["prompt"], body["prompt_logprobs"]
        rows: list[Any] = [None]
        for index, logp in enumerate(self.rows(fault, ids)[:-1]):
            token = ids[index + 1]
            best = logp.topk(min(top, len(logp))).indices.tolist()
            best = best[:-1] if fault == "fewer" else best
            ranks = {token: int((logp >= logp[token]).sum())}
            ranks |= {each: place for place, each in enumerate(best, 1)}
            row = {}
            for each, rank in ranks.items():
                name = str(each + (10**6 if fault == "foreign" else 0))
                row[name] = {"logprob": self.value(fault, logp[each]), "rank": rank}
                row[name]["decoded_token"] = self.text(fault, each)
            rows.append(row)
        rows = rows[:-1] if fault == "counts" else rows
        if fault == "stale":
            rows[2] = {"0": {"logprob": 0.0, "rank": 0, "decoded_token": "<s>"}}
        choice: dict[str, Any] = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}
        choice |= {"stop_reason": None, "token_ids": None, "prompt_logprobs": rows, "prompt_token_ids": None}
        return {
            "id": "cmpl-0",
            "object": "text_completion",
            "model": body["model"],
            "choices": [choice, {**choice, "index": 1}] if fault == "choices" else [choice],
            "usage": {"prompt_tokens": len(ids), "total_tokens": len(ids) + 1, "completion_tokens": 1},
        }

    def sglang(self, fault: str, body: Mapping[str, Any]) -> Any:
        """Its JSON has null for infinities and NaN, and token 0 in place of the one with the largest id."""
        ids, top, start = body["input_ids"], body["top_logprobs_num"], body["logprob_start_len"]
        log_probabilities = self.rows(fault, ids)
        last = log_probabilities.shape[-1] - 1
        own: list[Any] = [[None, ids[start], self.text(fault, ids[start])]]
        likeliest: list[Any] = [None]
        for index in range(start + 1, len(ids)):
            logp = log_probabilities[index - 1]
            shift = 10**6 if fault == "foreign" else 0

            def entry(token: int, written: int, logp: torch.Tensor = logp, shift: int = shift) -> list[Any]:
                value = self.value(fault, logp[token])
                null = math.isnan(value) or value == ZERO
                return [None if null else value, written + shift, self.text(fault, written)]

            own.append(entry(ids[index], ids[index] if ids[index] < last else 0))
            best = logp.topk(min(top, len(logp))).indices.tolist()
            likeliest.append([entry(each, each) for each in (best[:-1] if fault == "fewer" else best)])
        if fault == "counts":
            own, likeliest = own[:-2], likeliest[:-2]
        meta: dict[str, Any] = {"id": "0", "finish_reason": {"type": "length", "length": 0}}
        meta |= {"prompt_tokens": len(ids), "completion_tokens": 0}
        meta |= {"input_token_logprobs": own, "output_token_logprobs": []}
        meta |= {"input_top_logprobs": likeliest, "output_top_logprobs": []}
        return {"text": "", "output_ids": [], "meta_info": meta}


def main() -> None:
    server = Server(Model(sys.argv[1]))
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
