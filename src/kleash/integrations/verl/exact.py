"""The exact KL in verl's FSDP engine: from its own logits, and from hidden states kept when the reference ran."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import kl
from kleash.errors import CannotRunError
from kleash.integrations.verl.penalty import NAMES
from kleash.linear import Head, linear_kl
from kleash.models.heads import candidate_heads, head_logits

__all__ = ["REFERENCE_HIDDEN", "ExactKL"]

REFERENCE_HIDDEN = "kleash_reference_hidden"
"""What the reference's hidden states are called in the data that verl hands on."""

PER_TOKEN = "kleash_exact_kl"
MOST_NATS_OFF = 0.01


class ExactKL:
    """What one process of verl keeps for the exact KL, and the wrappers around verl's functions that use it.

    The reference's pass: its final hidden states go into the engine's output, as ``REFERENCE_HIDDEN``,
    ``[tokens, dim]``, and travel to the update in verl's own data; its head, ``[vocab, dim]``, stays in
    this process. The update: the policy's logits are read where the engine reads them, before it may write over
    them, and the reference's are made from hidden states and head, for a few tokens at a time.
    """

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._weights: tuple[Tensor, Tensor | None] | None = None
        self._head: Head | None = None
        self._watching = False
        self._hidden: Tensor | None = None
        self._without_adapter: list[Any] = []
        self.in_flight: Float[Tensor, "batch time"] | None = None
        """The KL of the micro-batch whose loss verl is computing; None without one."""

    def disable_adapter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """verl's ``FSDPEngine.disable_adapter``: inside, what the engine runs is the reference."""

        @wraps(original)
        def disable_adapter(engine: Any) -> AbstractContextManager[None]:
            return self._as_reference(engine, original(engine))

        return disable_adapter

    @contextmanager
    def _as_reference(self, engine: Any, without: AbstractContextManager[Any]) -> Iterator[None]:
        self._without_adapter.append(engine)
        try:
            with without:
                yield
        finally:
            self._without_adapter.remove(engine)

    def forward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """verl's ``FSDPEngineWithLMHead.forward_step``: watches what the reference's head is given."""

        @wraps(original)
        def forward_step(engine: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
            is_reference = engine in self._without_adapter or engine.engine_config.forward_only
            if not is_reference or loss_function is not None:
                return original(engine, micro_batch, loss_function, forward_only)
            with self._watched(engine.module):
                return original(engine, micro_batch, loss_function, forward_only)

        return forward_step

    @contextmanager
    def _watched(self, module: Any) -> Iterator[None]:
        """Inside, what the head of ``module`` is called with is seen, and copied if it is new."""
        layer = module.get_output_embeddings()
        handle = None if layer is None else layer.register_forward_pre_hook(self._look)
        self._watching, self._hidden = True, None
        try:
            yield
        finally:
            self._watching, self._hidden = False, None
            if handle is not None:
                handle.remove()

    def _look(self, layer: Any, args: tuple[Any, ...]) -> None:
        """While the head runs its weights are whole; FSDP takes them away again when it is done."""
        if hasattr(layer.weight, "full_tensor"):
            raise CannotRunError(
                "the reference's head is sharded over ranks while it runs; the exact KL takes no tensor parallelism"
            )
        self._hidden = args[0]
        now = (layer.weight.detach(), None if getattr(layer, "bias", None) is None else layer.bias.detach())
        if self._weights is None or not all(map(same, now, self._weights)):
            self._weights = (now[0].clone(), None if now[1] is None else now[1].clone())
            self._head = None

    def prepare_model_outputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """verl's ``FSDPEngineWithLMHead.prepare_model_outputs``: adds hidden states, or the KL, to its output."""

        @wraps(original)
        def prepare_model_outputs(
            engine: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
        ) -> Any:
            args = (engine, output, output_args, micro_batch, logits_processor_func)
            if self._watching:
                hidden = self._keep(engine, output, micro_batch)
                return original(*args) | {REFERENCE_HIDDEN: hidden}
            if not is_exact(logits_processor_func):
                return original(*args)
            per_token = self._per_token(engine, output, output_args, micro_batch)
            return original(*args) | {PER_TOKEN: per_token}

        return prepare_model_outputs

    def ppo_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """verl's ``ppo_loss``: while it runs, ``in_flight`` is the KL of its micro-batch."""

        @wraps(original)
        def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
            per_token = model_output.get(PER_TOKEN)
            self.in_flight = None if per_token is None else padded(per_token, data)
            try:
                return original(config=config, model_output=model_output, data=data, dp_group=dp_group)
            finally:
                self.in_flight = None

        return ppo_loss

    def _keep(self, engine: Any, output: Any, micro_batch: Any) -> Tensor:
        """The hidden states of all tokens, packed as verl packs them; how to read the head is found out."""
        rows = packed_logits(engine, output, micro_batch).detach()
        if self._hidden is None or self._weights is None:
            raise CannotRunError(
                f"the head of the reference ({type(engine.module).__name__}) was not called with hidden states, which "
                "the exact KL is computed from; ask for kl_loss_type=k3+"
            )
        hidden = packed(engine, self._hidden, micro_batch).detach()
        if self._head is None or not nats_off(rows, hidden, self._head) <= MOST_NATS_OFF:
            heads = candidate_heads(engine.module.config, Head(*self._weights))
            self._head = min(heads, key=lambda head: nats_off(rows, hidden, head))
        off = nats_off(rows, hidden, self._head)
        if not off <= MOST_NATS_OFF:
            raise CannotRunError(
                f"the reference ({type(engine.module).__name__}) does not come apart into hidden states and head: what "
                f"the head makes of them is {off:.3g} nats off its own logits; ask for kl_loss_type=k3+"
            )
        return torch.nested.nested_tensor_from_jagged(hidden.clone(), micro_batch["input_ids"].offsets())

    def _per_token(self, engine: Any, output: Any, output_args: Any, micro_batch: Any) -> Tensor:
        """KL(policy || reference) where responses are predicted, 0 elsewhere; packed as verl packs it."""
        self._require(REFERENCE_HIDDEN in micro_batch.keys(), "its hidden states are not in the data")  # noqa: SIM118
        self._require(self._head is not None, "its head is not in this process")
        assert self._head is not None
        rows = packed_logits(engine, output, micro_batch)
        places = padded(torch.arange(1, len(rows) + 1, device=rows.device), micro_batch)
        places = places[places > 0] - 1
        token_kl = linear_kl(
            rows[places],
            Head(None),
            micro_batch[REFERENCE_HIDDEN].values()[places],
            self._head,
            temperature=temperatures(output_args, micro_batch)[places],
        )
        per_token = torch.zeros(len(rows), dtype=token_kl.dtype, device=rows.device).index_put(
            (places,), token_kl
        )
        return torch.nested.nested_tensor_from_jagged(per_token, micro_batch["input_ids"].offsets())

    def _require(self, there: bool, lacking: str) -> None:
        if not there:
            raise CannotRunError(
                f"the exact KL needs what the reference's pass kept, and {lacking}; install(exact=True) in every "
                "worker, with actor and reference in the same processes and trainer.use_v1=True, or ask for k3+"
            )


def padded(tensor: Tensor, data: Any) -> Tensor:
    """The rows of packed ``tensor`` that predict responses, ``[batch, time, …]``: by verl's own rule."""
    return import_module("verl.workers.utils.padding").no_padding_2_padding(tensor, data)


def is_exact(loss_function: Any) -> bool:
    """Whether verl's loss function, a partial of its configuration, asks for the exact KL."""
    config = getattr(loss_function, "keywords", {}).get("config")
    if config is None or not config.use_kl_loss:
        return False
    return NAMES.get(config.kl_loss_type.removesuffix("+")) == "exact"


def packed_logits(engine: Any, output: Any, micro_batch: Any) -> Float[Tensor, "tokens vocab"]:
    """The engine's logits, as it reads them, one row for each token that is not padding."""
    engine_logits = getattr(output, "logits", None)
    if engine_logits is None or hasattr(engine_logits, "full_tensor") or engine.use_ulysses_sp:
        why = "no logits" if engine_logits is None else "logits sharded over ranks"
        raise CannotRunError(
            f"the engine has {why}, which the exact KL is computed from; set use_fused_kernels=False, "
            "ulysses_sequence_parallel_size=1 and no tensor parallelism, or ask for kl_loss_type=k3+"
        )
    return packed(engine, engine_logits, micro_batch)


def packed(engine: Any, values: Tensor, micro_batch: Any) -> Tensor:
    """What a model gave for each token, ``[1, packed, …]`` or ``[batch, time, …]``, without padding."""
    offsets = micro_batch["input_ids"].offsets()
    total = int(offsets[-1])
    if values.shape[0] == 1 and values.shape[1] >= total:
        return values[0, :total]
    return values[torch.arange(values.shape[1], device=values.device) < offsets.diff().unsqueeze(1)]


def temperatures(output_args: Any, micro_batch: Any) -> Float[Tensor, " tokens"]:
    """The temperature of each token, as verl's own ``prepare_model_inputs`` laid it out."""
    lengths = micro_batch["input_ids"].offsets().diff()
    if "temperature_rmpad" in output_args:
        return output_args["temperature_rmpad"][: int(lengths.sum())]
    return output_args["temperature"].repeat_interleave(lengths)


def same(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether two tensors hold the same numbers, or neither is there."""
    if first is None or second is None:
        return first is second
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)


def nats_off(rows: Float[Tensor, "tokens vocab"], hidden: Float[Tensor, "tokens dim"], head: Head) -> float:
    """How far, at the last token, the head's distribution is from the model's own."""
    model_logp = rows[-1:].float().log_softmax(-1)
    return float(kl(model_logp, head_logits(hidden[-1:], head).float().log_softmax(-1)))
