"""A small Llama and its byte-level BPE tokenizer: making, training, measuring."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BEGIN, END = "<s>", "</s>"
VOCABULARY = 2560
CONTEXT = 512


def learn_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that begins every text with ``<s>``."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, bpe.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two million parameters: four layers of width 192."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=cast(int, tokenizer.bos_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """AdamW with a linear warm-up and a cosine decay to 0."""

    steps: int
    warmup: int
    peak: float
    """The largest learning rate."""
    batch_tokens: int = 4096
    weight_decay: float = 0.1

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.peak * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup)))


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Token ids of whole documents, ``<s>`` in front and ``</s>`` behind, cut to the context."""
    return [[*ids, tokenizer.eos_token_id][:CONTEXT] for ids in tokenizer(texts, verbose=False)["input_ids"]]


def batches(documents: list[list[int]], budget: int, draw: Random) -> Iterator[list[list[int]]]:
    """Batches of documents of similar length, up to ``budget`` padded tokens each, in random order."""
    by_length = sorted(documents, key=lambda ids: (len(ids) // 16, draw.random()))
    groups: list[list[list[int]]] = [[]]
    for ids in by_length:
        if (len(groups[-1]) + 1) * max(map(len, [*groups[-1], ids])) > budget:
            groups.append([])
        groups[-1].append(ids)
    draw.shuffle(groups)
    yield from groups


def token_losses(model: LlamaForCausalLM, documents: list[list[int]]) -> Tensor:
    """Minus log-probability, in nats, of every token after the first of each document."""
    longest = max(map(len, documents))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in documents])
    real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in documents])
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    counted = real[:, 1:].bool()
    return functional.cross_entropy(
        model.lm_head(hidden[counted]).float(), ids[:, 1:][counted], reduction="none"
    )


def train(
    model: LlamaForCausalLM,
    epoch: Callable[[int], list[list[int]]],
    schedule: Schedule,
    seed: str,
) -> None:
    """Train on ``epoch(0)``, ``epoch(1)``, ... until the schedule ends."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=schedule.weight_decay)
    model.train()
    step, tokens, began, recent = 0, 0, time.monotonic(), []
    for number in range(schedule.steps):
        for batch in batches(epoch(number), schedule.batch_tokens, Random(f"{seed}/{number}")):
            if step == schedule.steps:
                return
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            loss = token_losses(model, batch).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recent.append(loss.item())
            step, tokens = step + 1, tokens + sum(map(len, batch))
            if step % 50 == 0:
                pace = tokens / (time.monotonic() - began)
                loss_now = sum(recent) / len(recent)
                print(f"step {step:5d}  epoch {number}  loss {loss_now:.3f}  {pace:.0f} tokens/s")
                recent.clear()


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, documents: list[list[int]]) -> tuple[float, int]:
    """Nats per token over documents, and the number of tokens."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches(documents, 8192, Random(0)):
        losses = token_losses(model, batch).double()
        total, count = total + losses.sum().item(), count + losses.numel()
    return total / count, count
