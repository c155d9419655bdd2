"""The responses that TRL's GRPO and RLOO learn from, measured in the passes of the trainer's own loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import dropwhile
from operator import eq
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from kleash.errors import CannotRunError, ModelError
from kleash.estimators import importance_weights, sampled_kl
from kleash.integrations.trainer.compat import tokenizer_of
from kleash.integrations.trl.forward_capture import (
    ForwardPass,
    find_policy_pass,
    mode_of,
    passes_over,
    recorded_passes,
    warn_of_dropout,
    without_nan,
)
from kleash.integrations.trl.kl_mixin import (
    OLD_LOGP,
    POLICY_LOGP,
    REFERENCE_LOGP,
    TOKEN_KL,
    KLMixin,
    prompt_hashes,
    response_mask,
)
from kleash.registry import options_given
from kleash.sources.sequences import text_after
from kleash.store import Sample
from kleash.training.hacking_monitor import KL_METRICS
from kleash.training.response_metrics import Response, gather_object, response_metrics, to_samples
from kleash.training.rewards import require_scored

RESPONSES, STEP = "kleash_responses", "kleash_step"
"""Entries that are added to a generated batch: fields of each ``Response``, until it is measured; and the number of the
updates before."""
EVALUATION = {
    "reward/score": "eval/reward",
    "reward/score_error": "eval/reward_error",
    "kl/exact_per_sequence": "eval/kl_per_sequence",
    "kl/exact_per_sequence_error": "eval/kl_per_sequence_error",
}
"""Metric of responses -> the metric of responses to held-out prompts."""


class ResponseRecorder:
    """Measures each response where the loss reads it first, and adds metrics of all since the last log to TRL's log.

    No pass of a model is added: log-probabilities and entropies are those of TRL's passes, and the exact KL is that of
    a trainer with ``KLMixin``. With several processes, all responses are gathered. Responses of an evaluation are
    kept for ``pop_evaluation``.
    """

    def __init__(self, trainer: Any, *, name_of: Callable[[Mapping[str, Any]], str] | None = None) -> None:
        """Put a recorder in front of methods of the trainer.

        Args:
            trainer: TRL's GRPO or RLOO trainer.
            name_of: the name of a row of the data set, by which a CannotRunError says to which prompt a response is to
                which no reward applies; None to let such responses be.
        """
        self.trainer, self.name_of = trainer, name_of
        self.note: str | None = None
        """Why the exact KL, or any, is not measured, where it could have been."""
        self.is_exact = isinstance(trainer, KLMixin)
        """Whether the exact KL is measured."""
        if isinstance(trainer, KLMixin):
            try:
                trainer.measure_exact_kl()
            except (CannotRunError, ModelError) as error:
                self.is_exact, self.note = False, f"the exact KL is not measured: {error}"
        else:
            warn_of_dropout(trainer)
            if trainer.beta == 0:
                self.note = (
                    "the trainer's beta is 0, so it loads no reference and no KL is measured; give its configuration "
                    "a beta, attach a monitor with a reference, or train with kleash's LeashedGRPOTrainer"
                )
        names = trainer.reward_func_names
        self._reward_names = [
            f"{name}-{names[:at].count(name) + 1}" if name in names[:at] else name
            for at, name in enumerate(names)
        ]
        """Those of TRL, with a number where two functions have one, as ``load_rewards`` names them."""
        self._rewarded: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        """Tokens of a response of this process that was just rewarded -> fields of ``Response`` that are known then, of
        each such response: a subclass may fill a batch from several generations."""
        self._responses: dict[str, list[Response]] = {"train": [], "eval": []}
        self._update_sums = (0, 0.0, 0)
        """A step whose responses were updated on before, the KL of these updates over its tokens, and their number."""
        self.samples: list[Sample] = []
        """The responses that the last log is about; empty where it is about further passes over earlier ones."""
        self.event = self._problem = ""
        """Why they were not measured, or not learned from; ``event`` is empty if the reason is that of those before."""
        for replacement in (
            self._calculate_rewards,
            self._generate_and_score_completions,
            self.compute_loss,
            self.log,
        ):
            name = replacement.__name__
            setattr(trainer, name, partial(replacement, getattr(trainer, name)))

    def kl_metric(self, per: str) -> str:
        """The metric of the KL per "sequence" or "token" that a controller follows."""
        return KL_METRICS[per][0 if self.is_exact else 1]

    def pop_evaluation(self) -> tuple[dict[str, float], list[Sample]]:
        """Metrics of an evaluation, and its responses. A collective."""
        local, self._responses["eval"] = self._responses["eval"], []
        responses = gather_object(local)
        measured = response_metrics(responses, self.trainer.beta) if responses else {}
        return (
            {name: measured[ours] for ours, name in EVALUATION.items() if ours in measured},
            to_samples(responses),
        )

    def _calculate_rewards(
        self,
        original: Callable[..., Tensor],
        inputs: Any,
        prompts: Any,
        completions: Any,
        completion_ids_list: Any,
    ) -> Tensor:
        """TRL's method; its rewards, gathered from all processes, are kept with this process's responses."""
        rewards = original(inputs, prompts, completions, completion_ids_list)
        columns = rewards.double().cpu()
        totals = (
            (columns * self.trainer.reward_weights.double().cpu())
            .nansum(-1)
            .apply_(
                lambda total: float(f"{total:.7g}")  # of float32, in which 0.1 + 0.2 is not 0.3
            )
        )
        scores = torch.where(columns.isnan().all(-1), torch.nan, totals)
        if self.name_of is not None:
            require_scored(
                dict(zip(self._reward_names, columns.numpy().T, strict=True)),
                gather_object([self.name_of(row) for row in inputs]),
            )
        if mode_of(self.trainer) == "train":
            groups = scores.view(-1, self.trainer.num_generations)
            # of those that have a score; in RLOO, TRL's rewards may contain the KL
            same = groups.nan_to_num(torch.inf).amin(-1) == groups.nan_to_num(-torch.inf).amax(-1)
            self.trainer._metrics["train"]["reward/zero_std_share"].append(same.double().mean().item())
        first = self.trainer.accelerator.process_index * len(prompts)
        for row, (prompt, ids) in enumerate(zip(prompts, completion_ids_list, strict=True), first):
            self._rewarded.setdefault(self._tokens_of(ids), []).append(
                {
                    "score": scores[row].item(),
                    "parts": dict(zip(self._reward_names, columns[row].tolist(), strict=True)),
                    "prompt": _text(prompt),
                }
            )
        return rewards

    def _tokens_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens of a response from the last to the first, without padding."""
        return tuple(dropwhile(partial(eq, tokenizer_of(self.trainer).pad_token_id), map(int, reversed(ids))))

    def _fields_of(self, output: Mapping[str, Any], row: int, *, is_whole: bool) -> dict[str, Any]:
        """The fields of a response that are known when it is rewarded; NaN if a subclass rewards in its own way.

        Its text is that of all tokens of the policy, with thinking and calls of tools, without what a tool says.

        Equal responses come in their order if the batch ``is_whole``, with all that were rewarded. Otherwise a subclass
        has left some out, and its prompt says which of them one is.
        """
        ids, tool_mask = output["completion_ids"][row], output.get("tool_mask")
        equal = self._rewarded.get(self._tokens_of(ids.tolist()), [])
        if tool_mask is not None and tool_mask[row].any():  # nowhere if the response is masked as a whole
            ids = ids[tool_mask[row].bool()]
        tokenizer, prompt_ids = tokenizer_of(self.trainer), output["prompt_ids"][row].tolist()
        response = {"response": text_after(tokenizer, prompt_ids, ids.tolist(), skip_special_tokens=True)}
        if equal and is_whole:
            return response | equal.pop(0)
        prompt = text_after(tokenizer, (), prompt_ids, skip_special_tokens=True)
        if not equal:
            return {
                **response,
                "score": math.nan,
                "parts": dict.fromkeys(self._reward_names, math.nan),
                "prompt": prompt,
            }
        # messages have a template between them, and one prompt may begin as another
        likeliest = max(
            equal,
            key=lambda each: (
                each["prompt"] == prompt,
                all(line in prompt for line in each["prompt"].splitlines()),
                len(each["prompt"]),
            ),
        )
        equal.remove(likeliest)
        return response | likeliest

    def _generate_and_score_completions(
        self, original: Callable[..., dict[str, Any]], inputs: Any
    ) -> dict[str, Any]:
        """TRL's method; its batch gets its entries and, of TRL's own passes, ``OLD_LOGP`` and ``REFERENCE_LOGP``."""
        self._rewarded = {}
        with recorded_passes(self.trainer) as passes:
            output = original(inputs)
        rows = range(len(output["completion_ids"]))
        is_whole = sum(map(len, self._rewarded.values())) == len(rows)
        output |= {
            RESPONSES: [self._fields_of(output, row, is_whole=is_whole) for row in rows],
            STEP: torch.tensor(self.trainer.state.global_step),
        }
        batch_passes = passes_over(passes, output)
        if "old_logps" in output and batch_passes and not isinstance(self.trainer, KLMixin):
            # TRL's RLOO, which keeps sums of its passes of policy and reference
            output[OLD_LOGP] = batch_passes[0].logp
            if self.trainer.beta != 0 and len(batch_passes) > 1:  # else a second pass is a RolloutDump's
                output[REFERENCE_LOGP] = batch_passes[1].logp
        return output

    def compute_loss(
        self, original: Callable[..., Tensor], model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """TRL's loss; responses that it reads for the first time are measured in its pass of the policy."""
        with recorded_passes(self.trainer) as passes:
            loss = original(model, inputs, *args, **kwargs)
        mask = response_mask(inputs)
        policy_pass = find_policy_pass(passes, model, inputs)
        if RESPONSES in inputs:
            self._responses[mode_of(self.trainer)] += self._read(
                inputs.pop(RESPONSES), inputs, mask, policy_pass
            )
        step = self.trainer.state.global_step
        if policy_pass and mode_of(self.trainer) == "train" and OLD_LOGP in inputs and step > inputs[STEP]:
            logp = policy_pass.logp.detach()
            nats = sampled_kl(inputs[OLD_LOGP][mask], logp[mask], "k3").sum().item()
            _, before, tokens = self._update_sums if self._update_sums[0] == step else (step, 0.0, 0)
            self._update_sums = (step, before + nats, tokens + int(mask.sum()))
        return loss

    def log(self, original: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's method, with the metrics of the responses since the last log. A collective.

        A callback may have evaluated after the step, and TRL then logs metrics of evaluations.
        """
        if "loss" in logs:
            self.trainer.model.train()
            self._add_metrics()
        original(logs, *args, **kwargs)

    def _add_metrics(self) -> None:
        """Add the metrics of all processes to those that TRL logs."""
        metrics = self.trainer._metrics["train"]
        # those of a prediction are of no evaluation, which comes after the log
        local, self._responses = self._responses["train"], {"train": [], "eval": []}
        sums, self._update_sums = self._update_sums, (0, 0.0, 0)
        _, nats, tokens = (sum(each) for each in zip(*gather_object([sums]), strict=True))
        if tokens:
            metrics["kl/update"] = [nats / tokens]  # of the last update that shows
        responses = gather_object(local)
        self.samples, self.event = to_samples(responses), ""
        if responses:
            measured = without_nan(response_metrics(responses, self.trainer.beta))
            metrics.update({name: [x] for name, x in measured.items()})
            before, self._problem = self._problem, ""
            if not all(response.tokens for response in responses):
                self._problem = (
                    f"the loss of {type(self.trainer).__name__} makes no pass by _get_per_token_logps_and_entropies, "
                    "in which responses are measured: their KL and entropy are not known, and steer no beta"
                )
            elif not any(len(response.tokens["token_logp"]) for response in responses):
                self._problem = (
                    "all responses are truncated: mask_truncated_completions leaves nothing to learn from"
                )
                for name in ("entropy", "clip_ratio/region_mean"):  # which TRL logs as 0
                    metrics.pop(name, None)
            self.event = "" if self._problem == before else self._problem

    def _read(
        self,
        rewarded: list[dict[str, Any]],
        inputs: dict[str, Any],
        mask: Bool[Tensor, "batch time"],
        policy_pass: ForwardPass | None,
    ) -> list[Response]:
        """The responses of a micro-batch, with their columns in float64; without columns if there was no pass."""
        known = {**inputs, **(getattr(self.trainer, "token_columns", None) or {})}
        columns = (
            {}
            if policy_pass is None
            else options_given(
                token_logp=known.get(POLICY_LOGP, policy_pass.logp),
                token_logq=known.get(REFERENCE_LOGP),
                token_kl=known.get(TOKEN_KL),
                entropy=policy_pass.entropy,
                weight=importance_weights(
                    policy_pass.logp, inputs.get(OLD_LOGP, policy_pass.logp), mask, level="token"
                ).values,
            )
        )
        arrays = {name: column.detach().double().cpu().numpy() for name, column in columns.items()}
        return [
            Response(
                prompt_hash=prompt_hash,
                tokens={name: array[row][is_counted] for name, array in arrays.items()},
                **known_before,
            )
            for row, (prompt_hash, is_counted, known_before) in enumerate(
                zip(prompt_hashes(inputs), mask.cpu().numpy(), rewarded, strict=True)
            )
        ]


def _text(turns: Any) -> str:
    """A text, or the contents of messages that are no tool's, with a hash in place of each image."""
    contents = (turn.get("content") for turn in turns if turn.get("role") != "tool")
    return turns if isinstance(turns, str) else "\n".join(map(_text_of_content, contents))


def _text_of_content(content: Any) -> str:
    """The text of a message: of its parts, if it has several."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return "".join(str(part["text"]) if "text" in part else _name_of_image(part) for part in parts)


def _name_of_image(part: Mapping[str, Any]) -> str:
    """What is called the same wherever the same image is shown: a hash of its pixels."""
    image = part.get(part["type"])
    pixels = image.tobytes() if hasattr(image, "tobytes") else repr(image).encode()
    return f"[{part['type']} {sha256(pixels).hexdigest()[:8]}]"
