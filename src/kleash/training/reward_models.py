"""Reward models: sequence classifiers with one label, loaded from a folder."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from kleash.checkpoints.resolution import find_checkpoint
from kleash.errors import CannotRunError, ModelError
from kleash.extras import import_extra, suppress_library_output
from kleash.models import Loading
from kleash.models.filling import loading
from kleash.models.network_loading import Candidate, load_as
from kleash.models.pair_loading import resolve_device, resolve_dtype
from kleash.models.tokenizers import load_tokenizer
from kleash.models.transformers_formats import check_stored_types
from kleash.sandbox.process import render_chat
from kleash.sources.sequences import batch_by_length

NO_CLASSIFIER = "; give a model that was trained for sequence classification, and brings no code of its own"
"""What to do if a reward model cannot be loaded."""


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """A prompt and the response to it, as texts."""

    prompt: str
    """The text of the prompt, with the policy's chat template applied."""
    response: str
    continuation: str | None = None
    """The response as it follows the prompt (``text_after``); None if that is ``response``."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The messages of the prompt; None if it is plain text."""
    name: str = ""
    """Its name in errors."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other columns of the prompt's record, by name."""
    token_ids: tuple[int, ...] | None = None
    """The tokens of the response with its end token; None if only the text is known."""


def load_reward_model(
    name: str, *, device: str = "auto", dtype: str = "auto", batch_tokens: int = 4096
) -> Callable[[Sequence[Dialogue]], list[float]]:
    """Load a sequence classifier with one label; returns its scoring function.

    Messages are formatted with the reward model's chat template, the response as the assistant's message. A plain
    prompt and its response are concatenated, as are messages if the model has no template. The reward model's tokenizer
    is used. Weights are loaded from safetensors only, and no code of the checkpoint is run.

    Args:
        name: folder or hub id.
        device: "auto" is the first GPU, or else the CPU.
        dtype: "auto" is float32 on a CPU and the checkpoint's own on an accelerator.
        batch_tokens: largest number of tokens in a forward pass, including padding.

    Raises:
        ModelError: if it cannot be loaded completely, is an adapter, or does not have exactly one label.
    """
    transformers = import_extra("transformers", "models")
    checkpoint = find_checkpoint(name, role="reward model")
    if checkpoint.adapter is not None:
        raise ModelError(f"{checkpoint} is an adapter; merge it into its base, and save that")
    options = Loading(device=device, dtype=dtype)
    resolved_device = resolve_device(options.device, None)
    with suppress_library_output():
        tokenizer = load_tokenizer(checkpoint, False)
        check_stored_types(checkpoint, None)
        with loading(checkpoint, NO_CLASSIFIER):
            config = transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
        classifier = Candidate(transformers.AutoModelForSequenceClassification.from_config, config, {})
        loaded = load_as(
            classifier, checkpoint, None, NO_CLASSIFIER, resolve_dtype(options.dtype, resolved_device), None
        )
    network = loaded.network
    for note in loaded.notes:  # such as tensors that are not used: a head's bias, in another architecture
        logging.getLogger(__name__).warning("the reward model %s: %s", name, note)
    if network.config.num_labels != 1:
        raise ModelError(
            f"{checkpoint} has {network.config.num_labels} labels; a reward is one number, so give one with 1"
        )
    return partial(_scores, name, network.to(resolved_device).eval(), tokenizer, batch_tokens)


@torch.inference_mode()
def _scores(
    name: str, network: Any, tokenizer: Any, batch_tokens: int, dialogues: Sequence[Dialogue]
) -> list[float]:
    """The reward of each dialogue by the model called ``name``, in their order."""
    texts = [
        torch.tensor(_tokens(name, network, tokenizer, dialogue), device=network.device)
        for dialogue in dialogues
    ]
    padding, scores = network.config.pad_token_id, dict[int, float]()
    for batch in batch_by_length(
        [len(text) for text in texts], batch_tokens, max_sequences=1 if padding is None else None
    ):
        rows = [texts[at] for at in batch]
        ids = pad_sequence(rows, batch_first=True, padding_value=padding or 0)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        scores |= zip(batch, network(input_ids=ids, attention_mask=mask).logits[:, 0].tolist(), strict=True)
    return [scores[at] for at in range(len(texts))]


def _tokens(name: str, network: Any, tokenizer: Any, dialogue: Dialogue) -> list[int]:
    """The token ids of a dialogue in the reward model's chat template, or as plain text."""
    if dialogue.messages is not None and getattr(tokenizer, "chat_template", None):
        messages = [*dialogue.messages, {"role": "assistant", "content": dialogue.response}]
        text, special = render_chat(tokenizer, messages), False
    else:
        continuation = dialogue.response if dialogue.continuation is None else dialogue.continuation
        text, special = dialogue.prompt + continuation, True
    tokens = list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    context = getattr(network.config, "max_position_embeddings", None)
    if not tokens or (context is not None and len(tokens) > context):
        raise CannotRunError(
            f"the reward model {name} reads 1 to {context} tokens and {dialogue.name} has {len(tokens)}; "
            "lower --max-new-tokens, or take shorter prompts"
        )
    return tokens
