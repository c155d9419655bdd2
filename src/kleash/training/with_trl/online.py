"""GRPO and RLOO by TRL's trainers, on a leash of ours."""

from math import ceil
from pathlib import Path
from typing import Any

from kleash.errors import OptionError, SourceError
from kleash.extras import import_extra
from kleash.integrations.trainer import BetaController
from kleash.jobs import GRPOJob, OnlineJob, RLOOJob
from kleash.models import Prompt, read_prompts
from kleash.store import TrainingResult
from kleash.training.job_controllers import leash_of
from kleash.training.reward_calls import reward_values
from kleash.training.reward_models import Dialogue
from kleash.training.rewards import Reward, check_rewards, load_rewards
from kleash.training.run_log import RunLog
from kleash.training.scheduling import shuffled
from kleash.training.with_trl.arguments import PROMPT_COLUMN, shared_arguments
from kleash.training.with_trl.networks import Networks, load_networks
from kleash.training.with_trl.runs import as_run, run
from kleash.training.with_trl.step_logger import StepLogger

MOST_ROWS = 10**7
"""Of a data set that holds the prompts of all steps."""


@as_run
def train_grpo(job: GRPOJob, run_log: RunLog | None = None) -> TrainingResult:
    """Train a policy by TRL's GRPO on a leash to its reference.

    TRL draws, compares and updates; rewards, KL, beta and run_log are kleash's. The loss is TRL's "dapo", a mean
    over all tokens; advantages are divided by the spread of their group, but with the KL in the reward.

    Args:
        job: what to train, and how; ``out`` is given.
        run_log: keeps the steps, on the first process. Left out there, this is ``kleash.training.train(job)``.

    Raises:
        SourceError, ModelError, OptionError, UnknownNameError: if an input or an option of the job is invalid.
        NonFiniteError: if a loss or a reward is NaN or infinite.
        CannotRunError, MissingExtraError: if an option is unsupported here or a dependency is missing.
    """
    from kleash.integrations.trl import LeashedGRPOTrainer
    from kleash.training.with_trl.measurement import measured

    settings = {
        "scale_rewards": "none" if job.kl_place == "reward" else "group",
        "use_bias_correction_kl": False,  # of TRL's own KL, which is off
    }
    config = import_extra("trl", "trl").GRPOConfig
    return _train(job, run_log, measured(LeashedGRPOTrainer), config, settings)


@as_run
def train_rloo(job: RLOOJob, run_log: RunLog | None = None) -> TrainingResult:
    """Train a policy by TRL's RLOO on a leash to its reference; as ``train_grpo``, which see.

    Each response is compared with the others to its prompt, and nothing is divided by any spread.
    """
    from kleash.integrations.trl import LeashedRLOOTrainer
    from kleash.training.with_trl.measurement import measured

    return _train(job, run_log, measured(LeashedRLOOTrainer), import_extra("trl", "trl").RLOOConfig, {})


def _train(
    job: GRPOJob | RLOOJob, run_log: RunLog | None, kind: Any, config: Any, settings: dict[str, Any]
) -> TrainingResult:
    check_rewards(job.rewards, job.source, job.limit)  # before any model is loaded
    networks = load_networks(job, job.reference_name)
    prompts = read_prompts(job.source, networks.pair, limit=job.limit, columns=True)
    rewards = load_rewards(
        job.rewards,
        tokenizer=networks.pair.tokenizer,
        device=job.device,
        dtype=job.dtype,
        batch_tokens=job.batch_tokens,
    )
    Path(str(job.out)).mkdir(parents=True, exist_ok=True)
    trainer = kind(
        model=networks.policy,
        reward_funcs=[_reward_function(reward, prompts) for reward in rewards.rewards],
        args=config(
            **_arguments(job, prompts),
            **settings,
            reward_weights=[reward.weight for reward in rewards.rewards],
        ),
        train_dataset=data_set(prompts, job, networks),
        processing_class=networks.pair.tokenizer,
        peft_config=networks.lora,
        reference=networks.other,
        kl=job.kl,
        kl_place=job.kl_place,
        kl_scope=job.kl_scope,
    )
    trainer.told_apart(prompts, rewards)
    if job.beta > 0:
        BetaController(leash_of(job), metric=f"kl/exact_per_{job.target_per}").attach(trainer)
    step_logger = StepLogger(
        job,
        run_log,
        updates=job.epochs,
        generated=trainer.take_generated,
        notes=networks.pair.notes,
    )
    step_logger.attach(trainer)
    return run(trainer, step_logger, job, networks.dtypes)


def _arguments(job: GRPOJob | RLOOJob, prompts: list[Prompt]) -> dict[str, Any]:
    longest = max(len(prompt.token_ids) for prompt in prompts) + job.max_new_tokens
    rows = job.prompts_per_step * job.samples_per_prompt
    return {
        **shared_arguments(job, rows=rows, row_tokens=longest, updates=job.epochs),
        "shuffle_dataset": False,
        "num_generations": job.samples_per_prompt,
        "max_completion_length": job.max_new_tokens,
        "temperature": job.temperature,
        "num_iterations": job.epochs,
        "epsilon": job.clip_range,
        "beta": job.beta,
    }


def data_set(prompts: list[Prompt], job: OnlineJob, networks: Networks, *, copies: int = 1) -> Any:
    """The prompts of all steps as TRL reads them, in the order in which kleash's PPO takes them.

    One pass over it is the whole run, unshuffled: a run that goes on finds its place by counting.

    Raises:
        SourceError: if TRL would make other tokens of a prompt than kleash.
        OptionError: if some prompts are texts and some messages, or the run is too long for one pass.
    """
    chats = {prompt.messages is not None for prompt in prompts}
    if len(chats) > 1:
        raise OptionError(
            "some prompts are texts and some are messages, which TRL takes one kind of; part the file"
        )
    tokenizer = networks.pair.tokenizer
    for prompt in prompts:
        if prompt.messages is None and tokenizer(text=prompt.text)["input_ids"] != list(prompt.token_ids):
            raise SourceError(
                f"{prompt.location}: TRL tokenises the prompt anew and gets other tokens than those that were given; "
                "give it as text that its tokens are the tokens of"
            )
    rows = [
        {"prompt": prompt.text if prompt.messages is None else list(prompt.messages), PROMPT_COLUMN: number}
        for number, prompt in enumerate(prompts)
    ]
    needed = job.steps * job.prompts_per_step
    if needed * copies > MOST_ROWS:
        raise OptionError(
            f"--steps {job.steps} with --prompts-per-step {job.prompts_per_step} is {needed * copies} rows of a data "
            f"set that TRL reads in one pass, and {MOST_ROWS} is the most; take fewer steps, and go on with --resume"
        )
    epochs = range(ceil(needed / len(prompts)))
    order = [place for epoch in epochs for place in shuffled(len(prompts), job.seed, "prompts", epoch)]
    places = [place for place in order[:needed] for _ in range(copies)]
    return import_extra("datasets", "trl").Dataset.from_list(rows).select(places)


def _reward_function(reward: Reward, prompts: list[Prompt]) -> Any:
    """A reward as TRL calls one: by its name, with texts, and with the column that says whose they are.

    The columns of the prompts come from the prompts themselves: Arrow would make all values of a column one type.
    """

    def function(*, completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[float]:
        rows = zip(columns[PROMPT_COLUMN], completions, completion_ids, strict=True)
        dialogues = [
            Dialogue(
                prompt=prompts[which].text,
                response=completion if isinstance(completion, str) else completion[-1]["content"],
                messages=prompts[which].messages,
                name=f"prompt {which}",
                columns=prompts[which].columns,
                token_ids=tuple(ids),
            )
            for which, completion, ids in rows
        ]
        return reward_values(reward.spec, reward.of, dialogues).tolist()

    function.__name__ = reward.name
    return function
