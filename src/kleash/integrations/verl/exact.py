"""The exact KL in verl's FSDP engine, from the policy's logits and stored hidden states of the reference."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import kl
from kleash.errors import CannotRunError
from kleash.extras import replaced
from kleash.integrations.verl.compat import response_rows
from kleash.integrations.verl.penalty import is_exact
from kleash.linear import Head, linear_kl
from kleash.models.heads import candidate_heads, head_logits
from kleash.precision import normalised

REFERENCE_HIDDEN = "kleash_reference_hidden"
"""Name of the reference's hidden states in verl's data."""

TOKEN_KL = "kleash_exact_kl"
"""Name of the KL of each token in the model output."""
MAX_HEAD_ERROR = 0.01
"""Largest KL in nats between the reference's own logits and those of hidden states and head."""


class ExactKL:
    """The exact KL in one process of verl: wrappers of verl's functions, and the state that they share.

    In the reference's pass, its final hidden states are added to the engine's output, as ``REFERENCE_HIDDEN``,
    ``[tokens, dim]``, and reach the update in verl's data; its head, ``[vocab, dim]``, stays in this process. In the
    update, the policy's logits are read before the engine, which may overwrite them, and the reference's are computed
    from hidden states and head, for a few tokens at a time.
    """

    def __init__(self) -> None:
        """Start without the reference's head."""
        self._head: Head | None = None
        """The reference's head, from its last pass."""
        self._head_input: Tensor | None = None
        """What the reference's head was called with in a pass: the final hidden states of the micro-batch."""
        self.micro_batch_kl: Float[Tensor, "batch time"] | None = None
        """The KL of the micro-batch whose loss verl is computing; None outside of ``ppo_loss``."""

    def forward_step(
        self,
        original: Callable[..., Any],
        engine: Any,
        micro_batch: Any,
        loss_function: Any,
        forward_only: bool,
    ) -> Any:
        """``FSDPEngineWithLMHead.forward_step``, which records input and weights of the reference's head."""
        if not is_reference_pass(engine, loss_function):
            return original(engine, micro_batch, loss_function, forward_only)
        layer = engine.module.get_output_embeddings()
        hook = nullcontext() if layer is None else layer.register_forward_pre_hook(self._record_head_call)
        self._head = None
        with hook, replaced(self, "_head_input", None):
            return original(engine, micro_batch, loss_function, forward_only)

    def _record_head_call(self, layer: Any, args: tuple[Any, ...]) -> None:
        """Record input and weights of the head; FSDP has gathered its weights only while it runs."""
        if hasattr(layer.weight, "full_tensor"):
            raise CannotRunError(
                "the reference's head is sharded over ranks while it runs; the exact KL takes no tensor parallelism"
            )
        self._head_input = args[0]
        bias = getattr(layer, "bias", None)
        self._head = Head(layer.weight.detach().clone(), None if bias is None else bias.detach().clone())

    def prepare_model_outputs(
        self,
        original: Callable[..., Any],
        engine: Any,
        output: Any,
        output_args: Any,
        micro_batch: Any,
        logits_processor_func: Any,
    ) -> Any:
        """``FSDPEngineWithLMHead.prepare_model_outputs``, with hidden states, or the KL, in its output."""
        added: dict[str, Tensor] = {}  # computed first, since verl may overwrite the logits
        if is_reference_pass(engine, logits_processor_func):
            added[REFERENCE_HIDDEN] = self._reference_hidden(engine, output, micro_batch)
        elif has_exact_kl(logits_processor_func):
            added[TOKEN_KL] = self._token_kl(engine, output, micro_batch)
        return original(engine, output, output_args, micro_batch, logits_processor_func) | added

    def ppo_loss(
        self, original: Callable[..., Any], config: Any, model_output: Any, data: Any, dp_group: Any = None
    ) -> Any:
        """``ppo_loss``; while it runs, ``micro_batch_kl`` is the KL of its micro-batch."""
        token_kl = model_output.get(TOKEN_KL)
        kl = None if token_kl is None else response_rows(token_kl, data)
        with replaced(self, "micro_batch_kl", kl):
            return original(config=config, model_output=model_output, data=data, dp_group=dp_group)

    def _reference_hidden(self, engine: Any, output: Any, micro_batch: Any) -> Tensor:
        """The hidden states of all tokens, packed as by verl; chooses the head's layout and checks it.

        Raises:
            CannotRunError: if hidden states and head do not give the model's own logits.
        """
        logits = packed_logits(engine, output, micro_batch).detach()
        if self._head_input is None or self._head is None:
            raise CannotRunError(
                f"the head of the reference ({type(engine.module).__name__}) was not called with hidden states, which "
                "the exact KL is computed from; ask for kl_loss_type=k3+"
            )
        hidden = pack(self._head_input, micro_batch).detach()
        heads = candidate_heads(engine.module.config, self._head)
        error, self._head = min(
            ((head_error(logits, hidden, head), head) for head in heads), key=lambda each: each[0]
        )
        if not error <= MAX_HEAD_ERROR:
            raise CannotRunError(
                f"the reference ({type(engine.module).__name__}) does not come apart into hidden states and head: the "
                f"head's logits are {error:.3g} nats off its own logits; ask for kl_loss_type=k3+"
            )
        return torch.nested.nested_tensor_from_jagged(hidden.clone(), micro_batch["input_ids"].offsets())

    def _token_kl(self, engine: Any, output: Any, micro_batch: Any) -> Tensor:
        """KL(policy || reference) at positions that predict responses, 0 elsewhere; packed as by verl."""
        hidden = micro_batch.get(REFERENCE_HIDDEN, None)
        if hidden is None or self._head is None:
            missing = "hidden states are not in the data" if hidden is None else "head is not in this process"
            raise CannotRunError(
                f"the exact KL needs what the reference's pass kept, and its {missing}; install(exact=True) in every "
                "worker, with actor and reference in the same processes and trainer.use_v1=True, or ask for k3+"
            )
        logits = packed_logits(engine, output, micro_batch)
        numbers = response_rows(torch.arange(1, len(logits) + 1, device=logits.device), micro_batch)
        positions = numbers[numbers > 0] - 1
        response_kl = linear_kl(
            logits[positions],
            Head(None),
            hidden.values()[positions],
            self._head,
            temperature=temperatures(micro_batch)[positions],
        )
        token_kl = torch.zeros(len(logits), dtype=response_kl.dtype, device=logits.device).index_put(
            (positions,), response_kl
        )
        return torch.nested.nested_tensor_from_jagged(token_kl, micro_batch["input_ids"].offsets())


def is_reference_pass(engine: Any, loss_function: Any) -> bool:
    """Whether a pass is the reference's: without a loss, by an engine that never trains or has its adapter off."""
    return loss_function is None and (
        engine.engine_config.forward_only
        # PEFT's of a layer, and not the method of transformers' models
        or any(getattr(layer, "disable_adapters", None) is True for layer in engine.module.modules())
    )


def has_exact_kl(loss_function: Any) -> bool:
    """Whether the configuration in verl's loss function (a partial) has the exact KL as its KL loss."""
    config = getattr(loss_function, "keywords", {}).get("config")
    return config is not None and config.use_kl_loss and is_exact(config.kl_loss_type)


def packed_logits(engine: Any, output: Any, micro_batch: Any) -> Float[Tensor, "tokens vocab"]:
    """The engine's logits, with a row for each token that is not padding.

    Raises:
        CannotRunError: if the engine has no logits, or they are sharded over ranks.
    """
    engine_logits = getattr(output, "logits", None)
    if engine_logits is None or hasattr(engine_logits, "full_tensor") or engine.use_ulysses_sp:
        why = "no logits" if engine_logits is None else "logits sharded over ranks"
        raise CannotRunError(
            f"the engine has {why}, which the exact KL is computed from; set use_fused_kernels=False, "
            "ulysses_sequence_parallel_size=1 and no tensor parallelism, or ask for kl_loss_type=k3+"
        )
    return pack(engine_logits, micro_batch)


def pack(values: Tensor, micro_batch: Any) -> Tensor:
    """The rows of ``values`` that are not padding, ``[tokens, …]``.

    Args:
        values: ``[1, tokens, …]``, packed already, or ``[batch, time, …]``.
        micro_batch: verl's data, whose "input_ids" have the offsets of the sequences.
    """
    offsets = micro_batch["input_ids"].offsets()
    total = int(offsets[-1])
    if values.shape[0] == 1 and values.shape[1] >= total:
        return values[0, :total]
    return values[torch.arange(values.shape[1], device=values.device) < offsets.diff().unsqueeze(1)]


def temperatures(micro_batch: Any) -> Float[Tensor, " tokens"]:
    """The temperature of each token; verl's data have one number, or one for each sequence."""
    ids = micro_batch["input_ids"]
    temperature = torch.as_tensor(micro_batch["temperature"], dtype=torch.float32, device=ids.device)
    return temperature.expand(len(ids)).repeat_interleave(ids.offsets().diff())


def head_error(
    logits: Float[Tensor, "tokens vocab"], hidden: Float[Tensor, "tokens dim"], head: Head
) -> float:
    """KL in nats, at the last token, between the model's own distribution and that of hidden state and head."""
    model_logp = normalised(logits[-1:].float())
    return float(kl(model_logp, normalised(head_logits(hidden[-1:], head).float())))
