"""GRPO and RLOO by TRL's trainers with kleash's KL term, rewards and beta controllers."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kleash.errors import SourceError
from kleash.extras import import_extra
from kleash.integrations.trainer import BetaController
from kleash.integrations.trl.compat import MIXIN
from kleash.jobs import GRPOJob, RLOOJob
from kleash.jobs.train import OnlineJob
from kleash.launch_environment import launched_world_size
from kleash.models import Pair, Prompt, TokenSequence, read_prompts
from kleash.sources.sequences import text_after
from kleash.store import TrainingResult
from kleash.training.job_schedule import leash_of, prompt_indices
from kleash.training.library_fields import set_fields, trl_config
from kleash.training.networks import load_networks
from kleash.training.reward_models import Dialogue
from kleash.training.rewards import Reward, check_rewards, load_rewards, reward_values
from kleash.training.run_log import RunLog
from kleash.training.with_trl.runs import (
    PROMPT_COLUMN,
    even_batch,
    held_out_arguments,
    run_trainer,
    shared_arguments,
    suppress_output,
)


class TokenPromptsMixin(MIXIN):
    """Mixin before one of TRL's trainers: its prompts are the tokens that kleash made of them.

    TRL would render messages without the template's variables and tools of their record, and parts of a content as
    Python prints them.
    """

    items: Sequence[Prompt] | Sequence[TokenSequence]
    """The prompts (or responses with their prompts) that ``PROMPT_COLUMN`` numbers."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's method, whose output keeps the numbers; during it, ``_batch`` has the items of the rows."""
        numbers = [row[PROMPT_COLUMN] for row in inputs]
        self._batch: list[Any] = [self.items[number] for number in numbers]
        return super()._generate_and_score_completions(inputs) | {PROMPT_COLUMN: torch.tensor(numbers)}

    def _tokenize_prompts(self, _: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [list(prompt.token_ids) for prompt in self._batch], None, {}


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

    leashed = LeashedGRPOTrainer if isinstance(job, GRPOJob) else LeashedRLOOTrainer
    trainer_class: Any = type("KleashTrainer", (TokenPromptsMixin, leashed), {})
    check_rewards(job.rewards, job.source, job.limit, job)  # before any model is loaded
    if job.eval_prompts is not None:
        check_rewards(job.eval_reward or job.rewards, job.eval_prompts, None, job)
    networks = load_networks(job, job.reference_name, device=job.device)
    prompts = read_prompts(job.source, networks.pair, limit=job.limit, columns=True, reading=job)
    held_out = (
        []
        if job.eval_prompts is None
        else read_prompts(job.eval_prompts, networks.pair, columns=True, reading=job)
    )
    items = [*prompts, *held_out]
    names = [f"prompt {number} ({prompt.location})" for number, prompt in enumerate(items)]
    rewards = load_rewards(
        (*job.rewards, *job.eval_reward),
        tokenizer=networks.pair.tokenizer,
        device=job.device,
        dtype=job.dtype,
        batch_tokens=job.batch_tokens,
    )
    trainer = trainer_class(
        model=networks.policy,
        reward_funcs=_reward_functions(
            job, rewards.rewards, items, names, networks.pair.tokenizer, first_held_out=len(prompts)
        ),
        args=trl_config(
            job,
            **_arguments(job, longest_row(items, job, networks.pair), len(held_out)),
            reward_weights=[reward.weight for reward in rewards.rewards],
        ),
        train_dataset=in_step_order(prompt_rows(prompt.text for prompt in prompts), job),
        eval_dataset=prompt_rows((prompt.text for prompt in held_out), first=len(prompts))
        if held_out
        else None,
        processing_class=networks.pair.tokenizer,
        peft_config=networks.lora,
        reference=networks.frozen,
        kl=job.kl,
        kl_place=job.kl_place,
        kl_scope=job.kl_scope,
    )
    trainer.items = items
    recorder = ResponseRecorder(trainer, name_of=lambda row: names[row[PROMPT_COLUMN]])
    if job.beta > 0:
        BetaController(leash_of(job), metric=recorder.kl_metric(job.target_per)).attach(trainer)
    return run_trainer(trainer, job, run_log, networks, trl_steps_per_step=job.epochs, recorder=recorder)


def longest_row(prompts: Sequence[Prompt], job: OnlineJob, pair: Pair) -> int:
    """Tokens of the longest prompt with its response.

    Raises:
        SourceError: if the models do not read as many: TRL generates beyond their context.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    tokens = len(longest.token_ids) + job.max_new_tokens
    if pair.context_length is not None and tokens - 1 > pair.context_length:  # the last token is not read
        raise SourceError(
            f"{longest.location}: the prompt is {len(longest.token_ids)} tokens long, and with a response of "
            f"--max-new-tokens {job.max_new_tokens} the models, which read at most {pair.context_length}, would read "
            f"{tokens - 1}; leave the prompt out, or take fewer new tokens"
        )
    return tokens


def _arguments(job: GRPOJob | RLOOJob, longest: int, held_out: int) -> dict[str, Any]:
    """The fields of TRL's configuration that the job decides, for rows of at most ``longest`` tokens."""
    of_grpo = {"scale_rewards": "none" if job.kl_place == "reward" else "group"}
    samples = set_fields(job).get("num_generations_eval") or job.samples_per_prompt
    # held-out prompts of a batch, which divide those of a process, since Accelerate fills the last batches with others
    prompts = even_batch(
        math.ceil(held_out / launched_world_size()), max(1, job.batch_tokens // (longest * samples))
    )
    of_held_out = held_out_arguments(job, rows=prompts * samples, updates=job.epochs, best="eval_reward")
    return {
        **shared_arguments(job, rows=job.responses_per_step, row_tokens=longest, updates=job.epochs),
        "shuffle_dataset": False,
        "num_generations": job.samples_per_prompt,
        "max_completion_length": job.max_new_tokens,
        "temperature": job.temperature,
        "num_iterations": job.epochs,
        "beta": job.beta,
        **(of_grpo if isinstance(job, GRPOJob) else {}),
        **(of_held_out if held_out else {}),
    }


def in_step_order(rows: Any, job: OnlineJob, *, copies: int = 1) -> Any:
    """The data set of TRL's trainer: the rows of all steps, ``copies`` times each, in the order of kleash's PPO.

    One pass over it, without shuffling, is the whole run, so that a resumed run finds its position by the step.
    ``data_seed`` of ``job.set`` stands for the job's seed here.
    """
    positions = (place // copies for place in range(job.steps * job.prompts_per_step * copies))
    return rows.select(prompt_indices(len(rows), positions, set_fields(job).get("data_seed", job.seed)))


def prompt_rows(texts: Iterable[str], *, first: int = 0) -> Any:
    """A data set with a row for each prompt: its text, and its number, from ``first``, in ``PROMPT_COLUMN``."""
    return import_extra("datasets", "trl").Dataset.from_list(
        [{"prompt": text, PROMPT_COLUMN: number} for number, text in enumerate(texts, first)]
    )


def _reward_functions(
    job: GRPOJob | RLOOJob,
    rewards: Sequence[Reward],
    prompts: Sequence[Prompt],
    names: Sequence[str],
    tokenizer: Any,
    *,
    first_held_out: int,
) -> list[Any]:
    """The functions of the rewards of training, then of those of held-out prompts, which stand in for the former."""
    numbers = range(len(prompts))
    of_training = numbers[:first_held_out] if job.eval_reward else numbers
    applies = [of_training] * len(job.rewards) + [numbers[first_held_out:]] * len(job.eval_reward)
    return [_reward_function(*each, prompts, names, tokenizer) for each in zip(rewards, applies, strict=True)]


def _reward_function(
    reward: Reward, applies: range, prompts: Sequence[Prompt], names: Sequence[str], tokenizer: Any
) -> Any:
    """The reward as a function that TRL can call, with the reward's name; errors call prompts by ``names``.

    It gets the index of each prompt (``PROMPT_COLUMN``) and takes the columns from the prompts, since Arrow would
    convert all values of a column to one type. Responses to prompts that are not in ``applies`` get NaN, as from a
    reward that does not apply to them.
    """

    def function(*, completions: list[str], completion_ids: list[Any], **columns: Any) -> list[float]:
        if columns[PROMPT_COLUMN][0] not in applies:  # a batch is of training prompts, or of held-out ones
            return [math.nan] * len(completions)
        dialogues = [
            Dialogue(
                prompt=prompts[which].text,
                response=completion,
                continuation=text_after(tokenizer, prompts[which].token_ids, ids, skip_special_tokens=True),
                messages=prompts[which].messages,
                name=names[which],
                columns=prompts[which].columns,
                token_ids=tuple(ids),
            )
            for which, completion, ids in zip(
                columns[PROMPT_COLUMN], completions, completion_ids, strict=True
            )
        ]
        return reward_values(reward.spec, reward.function, dialogues, reward.weight).tolist()

    function.__name__ = reward.name
    return function
