"""``attach``: drift monitor, beta controller, run log and report for a trainer that exists already."""

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kleash.errors import KleashError, OptionError
from kleash.jobs.options import checked_option
from kleash.jobs.train import TrainJob
from kleash.leash import CONTROLLERS, FixedBeta, Leash, PIDBeta
from kleash.leash.controller_base import KL_UNITS
from kleash.leash.controller_state import controller_of
from kleash.registry import look_up, require_choice
from kleash.training.run_log import LogOptions

if TYPE_CHECKING:
    from kleash.integrations.trainer import DriftMonitor
    from kleash.training.step_logger import FolderLog
    from kleash.training.with_trl.response_recorder import ResponseRecorder

GENERATING = ("grpo", "rloo", "gmpo")
"""Algorithms of which the responses are measured: their trainers are those of GRPO and RLOO."""
PROMPTS_OF_START = 32
"""Prompts for the KL to the reference as it was, where TRL moves it."""
NOT_DESCRIBED = (
    "output",
    "save",
    "logging",
    "log_",
    "eval",
    "hub",
    "push",
    "report",
    "run_name",
    "resume",
    "max_steps",
    "num_train_epochs",
    "per_device_",
    "gradient_accumulation_steps",
    "steps_per_generation",
)
"""Beginnings of the names of arguments that a resumed run may change, or that say nothing about its numbers."""


# Many arguments, since they are options of a run; all by keyword.
def attach(
    trainer: Any,
    *,
    target_nats: float | None = None,
    per: str = "sequence",
    controller: str | Leash = "pid",
    reference: Any = None,
    out: str | Path = "run/",
    monitor: "DriftMonitor | str | Sequence[Any] | None" = None,
    on_hacking: str = "warn",
    report_to: Sequence[str] = (),
    rollouts_every: int | None = None,
) -> "FolderLog":
    """Add a run log with alerts and a report to a trainer of TRL or transformers, and measure and control its KL.

    Training writes ``steps.jsonl``, ``samples.jsonl``, ``training.json`` and ``report.html``. Rewards, KL and entropy
    of GRPO and RLOO come from the passes of their own loss; an evaluation gives the held-out ones, and the best
    checkpoint is kept. The loss stays as it is: ``kleash.integrations.trl.LeashedGRPOTrainer`` and
    ``LeashedRLOOTrainer`` train the exact KL.

    >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    >>> sizes = {"vocab_size": 8, "hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1}
    >>> network = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=8))
    >>> trainer = Trainer(network, TrainingArguments("trained", report_to="none", use_cpu=True))
    >>> log = kleash.attach(trainer, out="run")  # trainer.train() writes the folder
    >>> log.folder.root.name, log.algorithm
    ('run', 'trainer')

    Args:
        trainer: before its ``train``.
        target_nats: the KL that ``controller`` steers beta to; None for no controller.
        per: unit of the target: "sequence" or "token".
        controller: "pid", "ziegler", "dual" or "fixed", from the trainer's beta on; or one of ``kleash.leash``. It
            follows the exact KL of a leashed trainer, k3 of TRL's GRPO and RLOO, and in DPO and KTO the monitor's KL:
            beta moves only where the monitor measures (``DriftMonitor(every=…)``).
        reference: what the monitor compares with; None for the trainer's own reference.
        out: the folder of the run, which is made when training begins.
        monitor: prompts, as those of ``DriftMonitor``, whose KL is measured every 100 steps; or a ``DriftMonitor``. In
            GRPO and RLOO whose reference TRL moves (``sync_ref_model``, BEMACallback), None stands for the first 32
            prompts of the training, unless an environment makes them, and the reference as it was.
        on_hacking: the response to alerts, which are logged: "warn", "stop", "halve-lr" or "tighten".
        report_to: trackers of the steps by kleash's names, beside those of the trainer.
        rollouts_every: steps between the batches of GRPO and RLOO that are written to ``out/rollouts`` with the columns
            of trainer and engine, for ``kleash doctor``; None for none.

    Returns:
        The callback that writes the folder; its ``result_of_run`` is the result once training has ended.

    Raises:
        OptionError, UnknownNameError: if an option is invalid, the trainer's beta is no price of a KL, its teacher is
            the policy itself, or a monitor has no reference.
    """
    from transformers.utils import get_json_schema

    from kleash.integrations.trainer.compat import makes_trl_passes, moves_reference
    from kleash.training.step_logger import FolderLog

    _check(trainer, on_hacking, report_to, per)
    if target_nats is not None and getattr(controller, "target_nats", None) is not None:
        raise OptionError(f"a {type(controller).__name__} has a target of its own; leave target_nats out")
    algorithm = _algorithm(trainer)
    is_read = algorithm in GENERATING and makes_trl_passes(trainer)
    if algorithm in GENERATING and not is_read and trainer.is_world_process_zero():
        logging.getLogger(__name__).warning(
            "%s passes over responses in its own way, not TRL's, so they are not measured: the KL is that of monitor=",
            type(trainer).__name__,
        )
    if (
        monitor is None
        and algorithm in GENERATING
        and moves_reference(trainer)
        and not getattr(trainer, "environment_factories", None)  # its prompts are no rows
    ):
        monitor = [  # messages with the tools and variables with which TRL renders them
            row
            | {
                "tools": [get_json_schema(tool) for tool in getattr(trainer, "tools", None) or ()],
                "chat_template_kwargs": getattr(trainer, "chat_template_kwargs", None),
            }
            for row in islice(trainer.train_dataset, PROMPTS_OF_START)
        ]
    drift_monitor = _drift_monitor(monitor, reference)
    if target_nats is not None or not isinstance(controller, str):
        _require_price(trainer, algorithm, is_steered=is_read or drift_monitor is not None)
    leash = _leash(trainer, controller, target_nats, per)
    if leash is None and on_hacking == "tighten":
        raise OptionError(
            "on_hacking='tighten' doubles the beta of a controller; give target_nats, or another response"
        )
    target: dict[str, Any] = {
        "target_nats": target_nats or getattr(leash, "target_nats", None),
        "target_per": per if leash is None else leash.per,
    }
    options = LogOptions(
        **target,
        beta_max=getattr(leash, "beta_max", LogOptions.beta_max),
        on_hacking=on_hacking,
        report_to=tuple(report_to),
        described={
            **_settings(trainer, algorithm, leash, drift_monitor),
            **target,
            **({} if on_hacking == LogOptions.on_hacking else {"on_hacking": on_hacking}),
        },
    )
    folder = Path(out).expanduser()
    with _undone_if_refused(trainer):
        if rollouts_every is not None:
            from kleash.integrations.trl.rollout_dump import RolloutDump

            RolloutDump(folder / "rollouts", every=rollouts_every).attach(trainer)
        recorder = _measure(trainer, drift_monitor, leash, is_read=is_read)
    return FolderLog(folder, options, algorithm, recorder=recorder).attach(trainer)


@contextmanager
def _undone_if_refused(trainer: Any) -> Generator[None]:
    """Context that leaves the trainer as it was if something is refused, so that ``attach`` can be called again."""
    callbacks, attributes = trainer.callback_handler.callbacks, dict(vars(trainer))
    before = [*callbacks]
    try:
        yield
    except KleashError:
        callbacks[:] = before
        vars(trainer).clear()
        vars(trainer).update(attributes)
        raise


def _measure(
    trainer: Any, monitor: "DriftMonitor | None", leash: Leash | None, *, is_read: bool
) -> "ResponseRecorder | None":
    """Add what measures the KL and what steers beta; returns the recorder of a trainer whose responses are read."""
    from kleash.integrations.trainer import BetaController

    recorder = None
    if is_read:
        from kleash.training.with_trl.response_recorder import ResponseRecorder

        recorder = ResponseRecorder(trainer)
    if leash is not None:
        drift = None if monitor is None else f"{monitor.name}/kl_per_{leash.per}"
        metric = drift if recorder is None else recorder.kl_metric(leash.per)
        BetaController(leash, metric=str(metric)).attach(trainer)
    if monitor is not None:
        monitor.attach(trainer)
    if recorder is not None:
        _keep_best(trainer.args)
        if (
            recorder.note is not None
            and (monitor is None or trainer.beta != 0)  # else the monitor measures
            and trainer.is_world_process_zero()
        ):
            logging.getLogger(__name__).warning(recorder.note)
    return recorder


def _check(trainer: Any, on_hacking: str, report_to: Sequence[str], per: str) -> None:
    """Refuse invalid options, and a trainer that has a run log, or learns from itself."""
    from kleash.models.live_models import require_two_networks
    from kleash.training.step_logger import StepLogger

    for name, value in (("on_hacking", on_hacking), ("report_to", report_to)):
        checked_option(name, value, TrainJob.__dataclass_fields__[name].type)
    require_choice(KL_UNITS, per=per)
    if not hasattr(trainer, "callback_handler"):
        raise OptionError(
            f"trainer must be a trainer of TRL or transformers; it is of type {type(trainer).__name__}"
        )
    if any(isinstance(callback, StepLogger) for callback in trainer.callback_handler.callbacks):
        raise OptionError("this trainer has a run log already; attach to it once")
    if (teacher := getattr(trainer, "teacher_model", None)) is not None:
        require_two_networks(*map(trainer.accelerator.unwrap_model, (trainer.model, teacher)))


def _algorithm(trainer: Any) -> str:
    """The name of what the trainer trains by: of its class, or of the public one of TRL that it comes from."""
    of_trl = (base for base in type(trainer).__mro__ if base.__module__.startswith("trl."))
    kind = next((base for base in of_trl if not base.__name__.startswith("_")), type(trainer))
    return kind.__name__.removeprefix("Unsloth").removesuffix("Trainer").lower() or "trainer"


def _drift_monitor(monitor: Any, reference: Any) -> "DriftMonitor | None":
    """The monitor: as it is given, or of prompts."""
    from kleash.integrations.trainer import DriftMonitor

    if monitor is None or isinstance(monitor, DriftMonitor):
        if reference is not None:
            raise OptionError(
                "reference= is what a monitor of prompts compares with; give monitor= its prompts, or the reference "
                "to the DriftMonitor itself (the reference of a loss is that of its trainer)"
            )
        return monitor
    return DriftMonitor(prompts=monitor, reference=reference)


def _leash(trainer: Any, controller: str | Leash, target_nats: float | None, per: str) -> Leash | None:
    """The controller in its initial state; None without a target."""
    if isinstance(controller, Leash):
        return controller
    look_up(CONTROLLERS, controller, "beta controller")
    if target_nats is None:
        if controller not in ("pid", "fixed"):  # the default, and what does nothing
            raise OptionError(f"the controller {controller} steers to a target; give target_nats")
        return None
    beta = trainer.beta or 1.0  # BetaController refuses a beta of 0
    return controller_of(
        {
            "kind": controller,
            "beta": beta,
            "beta_max": max(PIDBeta.beta_max, beta),
            "beta_min": min(PIDBeta.beta_min, beta),
            "target_nats": target_nats,
            "per": per,
        }
    )


def _require_price(trainer: Any, algorithm: str, *, is_steered: bool) -> None:
    """Refuse a controller of a beta that prices no KL, as the mixture of a distillation, or DPO of the loss "sft"."""
    from kleash.training.step_logger import PRICED

    if algorithm not in PRICED or getattr(trainer.args, "loss_type", None) == ["sft"]:
        raise OptionError(
            f"{type(trainer).__name__} has no beta that is the price of a KL and can be steered, as GRPO, RLOO, DPO "
            "and KTO have; leave target_nats out (monitor= measures the KL), or train with LeashedGRPOTrainer or "
            "LeashedRLOOTrainer of kleash.integrations.trl"
        )
    if not is_steered:
        raise OptionError(
            f"{type(trainer).__name__} draws no responses that TRL's passes measure, so its beta is steered by a "
            "measured drift; give monitor= prompts"
        )


def _keep_best(args: Any) -> None:
    """Have transformers keep the checkpoint with the largest held-out reward, unless it is told what is best.

    Where nothing is named, transformers takes "loss", which a schedule of the learning rate may follow too. Of one
    checkpoint that it is to keep, it would delete the last for the best.
    """
    if args.eval_strategy != "no" and (
        (args.metric_for_best_model is None and args.save_total_limit != 1)
        or (args.metric_for_best_model == "loss" and args.lr_scheduler_type != "reduce_lr_on_plateau")
    ):
        args.metric_for_best_model, args.greater_is_better = "eval_reward", True


def _settings(
    trainer: Any, algorithm: str, leash: Leash | None, monitor: "DriftMonitor | None"
) -> Mapping[str, Any]:
    """The settings of the run: its models, and what is not the default of trainer, controller and monitor."""
    network = trainer.accelerator.unwrap_model(trainer.model)
    return {
        **_changed_fields(trainer.args),
        # on whatever number of processes
        "global_batch_size": trainer.args.train_batch_size
        * trainer.args.gradient_accumulation_steps
        * trainer.args.world_size,
        **({} if leash is None else _changed_fields(leash)),
        **({} if monitor is None else _changed_fields(monitor.sampling, prefix="monitor_")),
        **(
            {"monitor_reference": monitor.reference}
            if monitor is not None and isinstance(monitor.reference, str)
            else {}
        ),
        "algorithm": algorithm,
        "trainer": type(trainer).__name__,
        "policy": str(
            getattr(getattr(network, "config", None), "_name_or_path", "") or type(network).__name__
        ),
        "controller": FixedBeta.kind if leash is None else leash.kind,
    }


def _changed_fields(record: Any, *, prefix: str = "") -> dict[str, Any]:
    """The fields of a record that are numbers or texts, say something about a run, and are not the default."""
    return {
        f"{prefix}{field.name}": value
        for field in fields(record)
        if isinstance(value := getattr(record, field.name), bool | int | float | str)
        and value != field.default
        and field.name != "per"  # which is the run's target_per
        and not field.name.startswith(NOT_DESCRIBED)
        and not field.name.endswith("token")
    }
