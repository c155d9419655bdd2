"""Responses of the shipped pair for benchmarks/doctor_trials.py: drawn with a faulty engine, and scored."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from kleash.models import Pair, load_pair, read_prompts
from kleash.shipped import shipped_folder

Array = np.ndarray
CONTEXT = 512
POOL, POOL_OF_REFERENCE = 640, 256
ROWS_AT_ONCE = 160
TOKENS_AT_ONCE = 8192
LOGIT_ROWS_AT_ONCE = 4096


def cache_folder() -> Path:
    """Where the pools of responses and the checkpoints are kept; remove it after a change of this module."""
    folder = Path(os.environ.get("KLEASH_DOCTOR_TRIALS", tempfile.gettempdir())) / "kleash-doctor-trials"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def shipped_pair(dtype: str = "float32") -> Pair:
    """The shipped pair."""
    return load_pair("shipped:policy", "shipped:reference", dtype=dtype)


@cache
def prompt_ids() -> list[tuple[int, ...]]:
    """The shipped prompts."""
    return [prompt.token_ids for prompt in read_prompts("shipped:prompts", shipped_pair(), limit=None)]


@dataclass(frozen=True, eq=False)
class Response:
    """The tokens of a prompt and of a response to it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Engine:
    """How responses are drawn: a network, and what is done to its positions, hidden states and logits."""

    network: Any
    process: Callable[[Tensor, Tensor, int], Tensor] | None = None
    """Maps ids so far [rows, time], logits [rows, vocab] and the padded length of prompts to logits."""
    change_hidden: Callable[[Tensor, Array, int], Tensor] | None = None
    """Maps hidden states [rows, dim], indices of the responses and the step to hidden states."""
    position: Callable[[Tensor], Tensor] | None = None
    """Maps positions in the sequence to those that the network is given."""
    window: int | None = None
    """Keys that a query attends to; None for all."""


@torch.inference_mode()
def draw(
    engine: Engine, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int], seed: int
) -> tuple[list[Response], list[Array]]:
    """Responses with the engine's log-probabilities of their tokens; at most ``lengths`` tokens each."""
    generator = torch.Generator().manual_seed(seed)
    order = np.argsort(lengths, kind="stable")
    drawn: dict[int, tuple[Response, Array]] = {}
    for start in range(0, len(order), ROWS_AT_ONCE):
        rows = order[start : start + ROWS_AT_ONCE]
        parts = _draw_rows(
            engine, [prompts[row] for row in rows], [lengths[row] for row in rows], rows, generator
        )
        drawn.update(zip(rows.tolist(), parts, strict=True))
    ordered = [drawn[row] for row in range(len(lengths))]
    return [response for response, _ in ordered], [logp for _, logp in ordered]


def _draw_rows(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    rows: Array,
    generator: torch.Generator,
) -> list[tuple[Response, Array]]:
    """``draw`` of one batch, whose prompts are padded on the left with their first tokens."""
    longest, steps = max(map(len, prompts)), max(lengths)
    ids = torch.tensor([(prompt[0],) * (longest - len(prompt)) + prompt for prompt in prompts])
    is_token = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    past, inputs = DynamicCache(), ids
    values: list[Tensor] = []
    for step in range(steps):
        places = (is_token.cumsum(1) - 1).clamp(min=0)
        seen, positions = is_token, places[:, -inputs.shape[1] :]
        if engine.window is not None and step:
            seen = is_token * (places > places[:, -1:] - engine.window)
        hidden = engine.network.model(
            inputs,
            seen,
            positions if engine.position is None else engine.position(positions),
            past,  # by place: its name differs between versions of transformers
            use_cache=True,
        ).last_hidden_state[:, -1]
        if engine.change_hidden is not None:
            hidden = engine.change_hidden(hidden, rows, step)
        logits = engine.network.lm_head(hidden).float()
        if engine.process is not None:
            logits = engine.process(ids, logits, longest)
        logp = logits.log_softmax(-1)
        inputs = torch.multinomial(logp.exp(), 1, generator=generator)
        values.append(logp.gather(-1, inputs))
        ids = torch.cat([ids, inputs], dim=1)
        is_token = torch.cat([is_token, torch.ones_like(inputs)], dim=1)
    responses, columns = ids[:, longest:].tolist(), torch.cat(values, dim=1).double().numpy()
    end = engine.network.config.eos_token_id
    ends = [
        min(length, response.index(end) + 1 if end in response else length)
        for response, length in zip(responses, lengths, strict=True)
    ]
    return [
        (Response(prompt, tuple(response[:length])), column[:length])
        for prompt, response, column, length in zip(prompts, responses, columns, ends, strict=True)
    ]


@cache
def pool(name: str = "policy") -> list[Response]:
    """Responses of a shipped model at temperature 1, as long as its context; kept in a file."""
    path = cache_folder() / f"pool-{name}.npz"
    if not path.exists():
        count = POOL if name == "policy" else POOL_OF_REFERENCE
        prompts = [prompt_ids()[row % len(prompt_ids())] for row in range(count)]
        model = getattr(shipped_pair(), name)
        lengths = [CONTEXT - len(prompt) for prompt in prompts]
        responses, _ = draw(Engine(network=model.network), prompts, lengths, seed=27)
        partial = path.with_name(f"{os.getpid()}-{path.name}")
        np.savez(
            partial,
            prompts=np.array([row % len(prompt_ids()) for row in range(count)]),
            lengths=np.array([len(response.tokens) for response in responses]),
            tokens=np.concatenate([response.tokens for response in responses]),
        )
        partial.replace(path)
    stored = np.load(path)
    parts = np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
    return [
        Response(prompt_ids()[prompt], tuple(tokens.tolist()))
        for prompt, tokens in zip(stored["prompts"], parts, strict=True)
    ]


@torch.inference_mode()
def hidden_states(
    network: Any,
    responses: Sequence[Response],
    position: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Final hidden states at all response tokens, [tokens, dim] in float32."""
    sizes = np.array([len(response.prompt) + len(response.tokens) - 1 for response in responses])
    order, parts, start = np.argsort(sizes, kind="stable"), {}, 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * sizes[order[stop]] <= TOKENS_AT_ONCE:
            stop += 1
        batch, width = order[start:stop], int(sizes[order[stop - 1]])
        rows = [(*responses[row].prompt, *responses[row].tokens)[:-1] for row in batch]
        ids = torch.tensor([row + (0,) * (width - len(row)) for row in rows])
        positions = torch.arange(width).expand(len(rows), -1)
        positions = positions if position is None else position(positions)
        states = network.model(
            input_ids=ids, position_ids=positions, use_cache=False
        ).last_hidden_state.float()
        for row, state in zip(batch, states, strict=True):
            parts[int(row)] = state[len(responses[row].prompt) - 1 : sizes[row]].clone()
        start = stop
    return torch.cat([parts[row] for row in range(len(responses))])


@dataclass(frozen=True, eq=False)
class Scores:
    """A model's hidden states at the tokens of responses, and what follows from them."""

    network: Any
    responses: Sequence[Response]
    hidden: Tensor

    @classmethod
    def of(
        cls,
        network: Any,
        responses: Sequence[Response],
        position: Callable[[Tensor], Tensor] | None = None,
    ) -> "Scores":
        """The scores of a network."""
        return cls(network, responses, hidden_states(network, responses, position))

    @cached_property
    def ids(self) -> Tensor:
        return torch.tensor([token for response in self.responses for token in response.tokens])

    @property
    def lengths(self) -> list[int]:
        return [len(response.tokens) for response in self.responses]

    @torch.inference_mode()
    def rowwise(self, function: Callable[[Tensor, slice], Tensor]) -> Array:
        """A function of blocks of float32 logits and their rows, as one float64 column."""
        values: list[Tensor] = []
        for start in range(0, len(self.ids), LOGIT_ROWS_AT_ONCE):
            rows = slice(start, start + LOGIT_ROWS_AT_ONCE)
            head = self.network.lm_head.weight.float()
            values.append(function(self.hidden[rows] @ head.T, rows).double())
        return torch.cat(values).numpy()

    def token(self, transform: Callable[[Tensor], Tensor]) -> Array:
        """A function of the logits [rows, vocab] at the tokens."""
        return self.rowwise(
            lambda logits, rows: transform(logits).gather(-1, self.ids[rows].unsqueeze(-1)).squeeze(-1)
        )

    @cached_property
    def logp(self) -> Array:
        """Log-probabilities of the tokens, in nats."""
        return self.token(lambda logits: logits.log_softmax(-1))

    def at(self, temperature: float) -> Array:
        """Log-probabilities at a temperature."""
        return self.token(lambda logits: (logits / temperature).log_softmax(-1))

    @property
    def unit(self) -> Array:
        """1 - p of each token: how far an error of its logit moves its log-probability."""
        return -np.expm1(self.logp)


@contextmanager
def weights_of(network: Any, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Context in which a network has other weights."""
    parameters = dict(network.named_parameters())
    saved = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(change(name, saved[name]))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])


def pair_with_head(seed: int, scale: float) -> tuple[str, str]:
    """Folders of a policy whose head has an update of rank 4, and of the reference with a head of its own."""
    folders = (cache_folder() / f"head-{seed}-{scale:.8f}", cache_folder() / "untied-reference")
    networks = (shipped_pair().policy.network, shipped_pair().reference.network)
    for folder, network, name in zip(folders, networks, ("policy", "reference"), strict=True):
        if (folder / "model.safetensors").exists():
            continue
        config = type(network.config).from_dict(network.config.to_dict() | {"tie_word_embeddings": False})
        untied = type(network)(config).float()
        untied.load_state_dict(network.state_dict())
        untied.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.detach().clone())
        if name == "policy":
            with torch.no_grad():
                untied.lm_head.weight += scale * head_update(seed)
        untied.save_pretrained(folder)
        for file in shipped_folder(name).glob("tokenizer*"):
            (folder / file.name).write_bytes(file.read_bytes())
    return str(folders[0]), str(folders[1])


def head_update(seed: int) -> Tensor:
    """An update of the head of rank 4, as large as the head."""
    weight = shipped_pair().policy.network.lm_head.weight.detach()
    generator = torch.Generator().manual_seed(seed)
    update = torch.randn(weight.shape[0], 4, generator=generator) @ torch.randn(
        4, weight.shape[1], generator=generator
    )
    return update * (weight.norm() / update.norm())
