"""GRPO and RLOO by TRL's trainers with kleash's KL term, rewards and beta controllers."""

from typing import Any

from kleash.errors import OptionError, SourceError
from kleash.extras import import_extra
from kleash.integrations.trainer import BetaController
from kleash.jobs import GRPOJob, RLOOJob
from kleash.jobs.train import OnlineJob
from kleash.models import Prompt, read_prompts
from kleash.store import TrainingResult
from kleash.training.job_schedule import leash_of, prompt_indices
from kleash.training.library_fields import trl_config
from kleash.training.networks import Networks, load_networks
from kleash.training.reward_models import Dialogue
from kleash.training.rewards import Reward, check_rewards, load_rewards, reward_values
from kleash.training.run_log import RunLog
from kleash.training.with_trl.runs import (
    PROMPT_COLUMN,
    held_out_arguments,
    run_trainer,
    shared_arguments,
    suppress_output,
)


@suppress_output()
def train_online(job: GRPOJob | RLOOJob, run_log: RunLog | None) -> TrainingResult:
    """Train a policy by TRL's GRPO or RLOO with a KL term to its reference.

    TRL generates, computes advantages and updates; rewards, KL term, beta and run log are kleash's. The loss of GRPO is
    TRL's default, "dapo", a mean over all tokens, unless ``job.set`` names another. Its advantages are divided by the
    standard deviation of their group, except with the KL in the reward. In RLOO, the baseline of each response is the
    mean of the other responses to its prompt; advantages are not rescaled.

    Args:
        job: the training job; ``out`` is set.
        run_log: records the steps; None on ranks other than 0.

    Raises:
        SourceError, ModelError, OptionError, UnknownNameError: if an input or an option of the job is invalid.
        NonFiniteError: if a loss or a reward is NaN or infinite.
        CannotRunError, MissingExtraError: if an option is unsupported here or a dependency is missing.
    """
    from kleash.integrations.trl import LeashedGRPOTrainer, LeashedRLOOTrainer
    from kleash.training.with_trl.response_recorder import ResponseRecorder

    trainer_class: Any = LeashedGRPOTrainer if isinstance(job, GRPOJob) else LeashedRLOOTrainer
    check_rewards(job.rewards, job.source, job.limit, job)  # before any model is loaded
    networks = load_networks(job, job.reference_name, device=job.device)
    prompts = read_prompts(job.source, networks.pair, limit=job.limit, columns=True, reading=job)
    held_out: list[Prompt] = []
    if job.eval_prompts is not None:
        held_out = read_prompts(job.eval_prompts, networks.pair, columns=True, reading=job)
    rewards = load_rewards(
        job.rewards,
        tokenizer=networks.pair.tokenizer,
        device=job.device,
        dtype=job.dtype,
        batch_tokens=job.batch_tokens,
    )
    trainer = trainer_class(
        model=networks.policy,
        reward_funcs=[_reward_function(reward, [*prompts, *held_out]) for reward in rewards.rewards],
        args=trl_config(
            job,
            **_arguments(job, [*prompts, *held_out]),
            reward_weights=[reward.weight for reward in rewards.rewards],
        ),
        train_dataset=in_step_order(prompt_rows(prompts, networks), job),
        eval_dataset=prompt_rows(held_out, networks, first=len(prompts)) if held_out else None,
        processing_class=networks.pair.tokenizer,
        peft_config=networks.lora,
        reference=networks.frozen,
        kl=job.kl,
        kl_place=job.kl_place,
        kl_scope=job.kl_scope,
    )
    recorder = ResponseRecorder(trainer, requires_rewards=True)
    if job.beta > 0:
        BetaController(leash_of(job), metric=recorder.kl_metric(job.target_per)).attach(trainer)
    return run_trainer(trainer, job, run_log, networks, trl_steps_per_step=job.epochs, recorder=recorder)


def _arguments(job: GRPOJob | RLOOJob, prompts: list[Prompt]) -> dict[str, Any]:
    """The fields of TRL's configuration that the job decides."""
    longest = max(len(prompt.token_ids) for prompt in prompts) + job.max_new_tokens
    arguments = {
        **shared_arguments(job, rows=job.responses_per_step, row_tokens=longest, updates=job.epochs),
        "shuffle_dataset": False,
        "num_generations": job.samples_per_prompt,
        "max_completion_length": job.max_new_tokens,
        "temperature": job.temperature,
        "num_iterations": job.epochs,
        "beta": job.beta,
    }
    if isinstance(job, GRPOJob):
        arguments["scale_rewards"] = "none" if job.kl_place == "reward" else "group"
    if job.eval_prompts is not None:
        arguments |= held_out_arguments(
            job, rows=job.samples_per_prompt, updates=job.epochs, best="eval_reward"
        )
    return arguments


def in_step_order(rows: Any, job: OnlineJob, *, copies: int = 1) -> Any:
    """The data set of TRL's trainer: the rows of all steps, ``copies`` times each, in the order of kleash's PPO.

    One pass over it, without shuffling, is the whole run, so that a resumed run finds its position by the step.
    """
    order = prompt_indices(len(rows), range(job.steps * job.prompts_per_step), job.seed)
    return rows.select([index for index in order for _ in range(copies)])


def prompt_rows(prompts: list[Prompt], networks: Networks, *, first: int = 0) -> Any:
    """A data set with a row for each prompt, and its number, from ``first``, in ``PROMPT_COLUMN``.

    Raises:
        SourceError: if TRL would tokenise a prompt differently.
        OptionError: if some prompts are texts and some messages.
    """
    if len({prompt.messages is not None for prompt in prompts}) > 1:
        raise OptionError(
            "some prompts are texts and some are messages, and TRL takes only one kind; split the file"
        )
    tokenizer = networks.pair.tokenizer
    for prompt in prompts:
        if prompt.messages is None and tokenizer(text=prompt.text)["input_ids"] != list(prompt.token_ids):
            raise SourceError(
                f"{prompt.location}: TRL tokenises the text of the prompt and gets other tokens than the prompt's "
                "token_ids; give the prompt as text only"
            )
    rows = [
        {"prompt": prompt.text if prompt.messages is None else list(prompt.messages), PROMPT_COLUMN: number}
        for number, prompt in enumerate(prompts, first)
    ]
    return import_extra("datasets", "trl").Dataset.from_list(rows)


def _reward_function(reward: Reward, prompts: list[Prompt]) -> Any:
    """The reward as a function that TRL can call, with the reward's name.

    It gets the index of each prompt (``PROMPT_COLUMN``) and takes the columns from the prompts, since Arrow would
    convert all values of a column to one type.
    """

    def function(*, completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[float]:
        rows = zip(columns[PROMPT_COLUMN], completions, completion_ids, strict=True)
        dialogues = [
            Dialogue(
                prompt=prompts[which].text,
                response=completion if isinstance(completion, str) else completion[-1]["content"],
                messages=prompts[which].messages,
                name=f"prompt {which} ({prompts[which].location})",
                columns=prompts[which].columns,
                token_ids=tuple(ids),
            )
            for which, completion, ids in rows
        ]
        return reward_values(reward.spec, reward.function, dialogues).tolist()

    function.__name__ = reward.name
    return function
