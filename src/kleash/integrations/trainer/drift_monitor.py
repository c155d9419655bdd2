"""A callback that measures KL(policy || reference) while a transformers ``Trainer`` trains."""

import logging
from collections.abc import Iterable
from time import monotonic
from typing import Any

from kleash.extras import import_extra
from kleash.integrations.trainer.callback import AttachedCallback
from kleash.integrations.trainer.compat import moves_reference, tokenizer_of
from kleash.leash.controller_base import KL_UNITS
from kleash.measuring import Drift
from kleash.measuring.drift import draw_drift, drift_of
from kleash.measuring.live_pair import live_pair, load_beside_live, require_adapter
from kleash.models import (
    Model,
    Pair,
    Prompt,
    Sampling,
    at_rest,
    in_lockstep,
    read_prompts,
    tokenise_prompts,
    turns_of,
)
from kleash.models.live_models import checked_language_model, require_two_networks
from kleash.registry import options_given, require_above, require_at_least, require_choice
from kleash.store.metrics import with_errors

LOG = logging.getLogger(__name__)


class DriftMonitor(AttachedCallback):
    """Measures KL(policy || reference) on fixed prompts at regular steps of a training, and logs it.

    The current policy generates responses to the prompts, and both models score them over the whole vocabulary. The
    random numbers are the same at every step, so that differences between steps come from the policy. Training is not
    affected: modes, adapters and random states are restored, and the run is bit for bit the same without the monitor.

    Logged are ``drift/kl_per_token``, ``drift/kl_per_sequence``, each with ``_error`` (standard error with prompts as
    clusters), ``drift/tokens_per_sequence``, ``drift/prompts`` and ``drift/seconds``, the time of the measurement;
    ``last`` is the whole Drift with its warnings. With several processes each generates for a part of the prompts; all
    get the same numbers.
    """

    # Many arguments, since they are options of a measurement; all by keyword.
    def __init__(
        self,
        *,
        prompts: str | Iterable[Any],
        reference: Any = None,
        every: int = 100,
        sampling: Sampling | None = None,
        limit: int | None = None,
        stop_at_nats: float | None = None,
        per: str = "sequence",
        batch_tokens: int = 4096,
        name: str = "drift",
    ) -> None:
        """Create the callback; ``attach`` adds it to a trainer.

        Args:
            prompts: a file in a format of ``kleash measure --prompts``, "shipped:prompts"; or texts, lists of messages
                or records, such as a data set.
            reference: a folder, hub id or "shipped:…"; a model in memory; or None for the trainer's reference: the base
                with adapters disabled, the adapter "ref", or its ``ref_model``; if TRL moves that one
                (``sync_ref_model``, ``update_ref_model`` of a BEMACallback), the checkpoint that it was loaded from.
            every: steps between measurements. The KL is also measured before the first step and after the last.
            sampling: sampling of the responses; by default 64 new tokens at temperature 1.
            limit: largest number of prompts.
            stop_at_nats: stop training when the KL is above this budget.
            per: unit of the budget: "sequence" or "token".
            batch_tokens: largest number of tokens in a forward pass.
            name: prefix of the metrics; a second monitor needs another one.

        Raises:
            OptionError: if an option is out of range.
        """
        require_at_least(1, every=every)
        require_choice(KL_UNITS, per=per)
        require_above(0.0, **options_given(stop_at_nats=stop_at_nats))
        self.prompts, self.reference, self.limit, self.name = prompts, reference, limit, name
        self.sampling = sampling or Sampling(max_new_tokens=64)
        self.every, self.batch_tokens = every, batch_tokens
        self.stop_at_nats, self.per = stop_at_nats, per
        self.last: Drift | None = None
        self.stopped: str | None = None
        self._loaded_pair: Pair | None = None
        self._parsed_prompts: list[Prompt] | None = None

    def attach(self, trainer: Any) -> "DriftMonitor":
        """Add this callback to the trainer; returns itself.

        Raises:
            OptionError: if it is attached already, there is no reference, or it is the policy's own network.
            ModelError: if a network has no language-model head, such as a reward model.
        """
        self._networks(trainer)
        return super().attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Measure before the first step, unless training resumes."""
        super().on_train_begin(args, state, control, **more)
        self.stopped = None
        if state.global_step == 0:
            self._measure_and_log(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure every ``every`` steps and after the last, and stop training if the KL is above the budget."""
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._measure_and_log(control)

    def measure(self) -> Drift:
        """Measure the drift of the current policy.

        Raises:
            OptionError: if the callback is not attached, there is no reference, or it is the policy's own network.
            ModelError: if the two models cannot be compared, or the weights are sharded in a way that is not supported.
            NonFiniteError: if a model gives NaN or infinities.
        """
        self.require_trainer()
        if self.reference is None and moves_reference(self.trainer):
            self.reference = self.trainer.accelerator.unwrap_model(self.trainer.ref_model).config.name_or_path
        networks = self._networks(self.trainer)
        with at_rest(*networks.values()):
            load = self._load if isinstance(self.reference, str) else None
            pair = in_lockstep(live_pair(networks, tokenizer_of(self.trainer), load))
            if self._parsed_prompts is None:
                self._parsed_prompts = (
                    read_prompts(self.prompts, pair, limit=self.limit)
                    if isinstance(self.prompts, str)
                    else tokenise_prompts(self.prompts, pair, self.limit)
                )
            accelerator = self.trainer.accelerator
            prompts = self._parsed_prompts[accelerator.process_index :: accelerator.num_processes]
            with turns_of(pair, self.sampling.temperature or 1.0):
                parts = (
                    [draw_drift(pair, prompts, self.sampling, batch_tokens=self.batch_tokens)]
                    if prompts
                    else []
                )
        return drift_of(import_extra("accelerate.utils", "models").gather_object(parts))

    def _measure_and_log(self, control: Any) -> None:
        """Measure the drift and log it; stop the training if the KL is beyond the budget."""
        start = monotonic()
        self.last = drift = self.measure()
        self.log_metrics(
            control,
            {
                **with_errors(
                    {
                        f"{self.name}/kl_per_token": drift.per_token,
                        f"{self.name}/kl_per_sequence": drift.per_sequence,
                    }
                ),
                f"{self.name}/tokens_per_sequence": drift.tokens / drift.sequences,
                f"{self.name}/prompts": float(drift.per_token.clusters),
                f"{self.name}/seconds": monotonic() - start,
            },
        )
        kl = drift.per(self.per).value
        if self.stop_at_nats is not None and kl > self.stop_at_nats:
            self.stopped = (
                f"KL(policy ‖ reference) is {kl:.4g} nats per {self.per}, beyond the budget of "
                f"{self.stop_at_nats:g}; training stops"
            )
            control.should_training_stop = True
            if self.trainer.is_world_process_zero():
                LOG.warning(self.stopped)

    def _networks(self, trainer: Any) -> dict[str, Any]:
        """The networks in memory by role: the policy, and the reference if it is a network of its own.

        Raises:
            OptionError: if there is no reference, or it is the policy's own network.
            ModelError: if a network has no language-model head.
        """
        reference = getattr(trainer, "ref_model", None) if self.reference is None else self.reference
        networks = {
            role: checked_language_model(trainer.accelerator.unwrap_model(network), role)
            for role, network in (("policy", trainer.model), ("reference", reference))
            if not isinstance(network, str | None)
        }
        if len(networks) > 1:
            require_two_networks(**networks)
        if reference is None:
            require_adapter(networks["policy"])
        return networks

    def _load(self, policy: Model) -> Pair:
        """The policy beside the reference of that name, which is loaded once."""
        if self._loaded_pair is None:
            self._loaded_pair = load_beside_live(policy, "reference", self.reference)
        return self._loaded_pair
