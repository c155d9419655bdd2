"""The doctor on responses that transformers drew of the shipped policy: a penalty, dropout, and a break at a token."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from kleash.diagnosis import RolloutRecord, diagnose
from kleash.diagnosis.rollout_records import padded
from kleash.leash import mismatch
from kleash.models import Pair, load_pair, read_prompts

PROMPTS, RESPONSES_PER_PROMPT = 16, 4
Array = np.ndarray


class Drawn:
    """Responses with the raw and the processed log-probabilities of their tokens, by transformers' generate."""

    def __init__(self, pair: Pair, new_tokens: int, processors: LogitsProcessorList | None = None) -> None:
        torch.manual_seed(0)
        network, self.pair = pair.policy.network, pair
        self.ids: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.raw: list[Array] = []
        self.processed: list[Array] = []
        for prompt in read_prompts("shipped:prompts", pair, limit=PROMPTS):
            output = network.generate(
                torch.tensor([prompt.token_ids]),
                attention_mask=torch.ones(1, len(prompt.token_ids), dtype=torch.long),
                num_return_sequences=RESPONSES_PER_PROMPT,
                do_sample=True,
                top_k=0,
                max_new_tokens=new_tokens,
                logits_processor=processors or LogitsProcessorList(),
                output_logits=True,
                output_scores=True,
                return_dict_in_generate=True,
            )
            responses = output.sequences[:, len(prompt.token_ids) :]
            columns = [
                torch.stack(steps, 1).double().log_softmax(-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1)
                for steps in (output.logits, output.scores)
            ]
            for row, ids in enumerate(responses.tolist()):
                end = ids.index(1) + 1 if 1 in ids else len(ids)
                self.ids.append((prompt.token_ids, tuple(ids[:end])))
                self.raw.append(columns[0][row, :end].numpy())
                self.processed.append(columns[1][row, :end].numpy())

    def rollouts(self, trainer: list[Array], engine: list[Array]) -> list[RolloutRecord]:
        return [
            RolloutRecord(
                prompt_ids=prompt,
                response_ids=response,
                trainer=trainer[row],
                engine=engine[row],
                reference=None,
                is_counted=np.ones(len(response), dtype=bool),
                location=f"response {row}",
            )
            for row, (prompt, response) in enumerate(self.ids)
        ]

    def scored(self) -> list[Array]:
        """Log-probabilities of the policy's network, one response at a time."""
        columns = []
        for prompt, response in self.ids:
            with torch.inference_mode():
                logits = self.pair.policy.network(torch.tensor([prompt + response])).logits[0]
            logp = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
            columns.append(logp.gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1).numpy())
        return columns


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("shipped:policy", "shipped:reference", dtype="float32")


@pytest.fixture(scope="module")
def penalised(pair: Pair) -> Drawn:
    return Drawn(pair, 64, LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.1)]))


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Drawn:
    return Drawn(pair, 192)


def mismatch_of(rollouts: list[RolloutRecord]) -> Any:
    columns = padded(rollouts)
    return mismatch(columns.trainer, columns.engine, columns.is_counted, prompts=columns.prompts)


@pytest.mark.parametrize("with_models", [True, False])
def test_a_repetition_penalty_of_the_engine_is_a_penalty(penalised: Drawn, with_models: bool) -> None:
    rollouts = penalised.rollouts(penalised.raw, penalised.processed)
    measured = mismatch_of(rollouts)
    weight = measured.mean_weight
    assert abs(weight.value - 1) < 4 * weight.standard_error, "the engine's column is what it draws from"
    findings = diagnose(rollouts, pair=penalised.pair if with_models else None, rounding="float32").findings
    assert findings[0].cause == "penalty" and findings[0].probability >= 0.5, findings


def test_draws_under_a_penalty_with_plain_columns_are_another_sampler(penalised: Drawn) -> None:
    """The columns agree, so only the tokens show it, against what the policy expects of them."""
    rollouts = penalised.rollouts(penalised.raw, penalised.raw)
    assert mismatch_of(rollouts).kl_engine_trainer.value == 0
    findings = diagnose(rollouts, pair=penalised.pair, rounding="float32").findings
    assert findings[0].cause == "sampler" and findings[0].probability >= 0.5, findings
    assert diagnose(rollouts, rounding="float32").findings == (), "without the models nothing shows it"


@contextmanager
def train_mode(network: torch.nn.Module, share: float, seed: int) -> Iterator[None]:
    """Context in which a network without dropout has it after each part of its layers."""
    generator = torch.Generator().manual_seed(seed)

    def drop(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (torch.rand(output.shape, generator=generator) >= share) / (1 - share)

    parts = [
        module
        for name, module in network.named_modules()
        if name.endswith(("self_attn.o_proj", "mlp.down_proj"))
    ]
    handles = [part.register_forward_hook(drop) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_dropout_in_the_trainer_is_dropout_and_no_other_weights(plain: Drawn) -> None:
    engine, network = plain.scored(), plain.pair.policy.network
    trainers = []
    for seed in (0, 1):
        with train_mode(network, 0.1, seed):
            trainers.append(plain.scored())
    differences = [np.concatenate(trainer) - np.concatenate(engine) for trainer in trainers]
    centred = [values - values.mean() for values in differences]
    shared = np.mean(centred[0] * centred[1]) / (centred[0].std() * centred[1].std())
    assert shared < 0.5, "two passes have errors of their own"
    for trainer in trainers:
        rollouts = plain.rollouts(trainer, engine)
        weight = mismatch_of(rollouts).mean_weight
        assert abs(weight.value - 1) < 4 * weight.standard_error
        findings = diagnose(rollouts, pair=plain.pair, rounding="float32").findings
        assert findings[0].cause == "dropout" and findings[0].probability >= 0.5, findings


@pytest.mark.parametrize("place", [16, 96, 160])
def test_the_token_at_which_errors_begin_is_named(plain: Drawn, place: int) -> None:
    random = np.random.default_rng(place)
    trainer = plain.scored()
    engine = [
        values
        + random.standard_normal(len(values))
        * -np.expm1(values)
        * np.where(np.arange(len(values)) < place, 0.01, 0.1)
        for values in trainer
    ]
    rollouts = plain.rollouts(trainer, [np.minimum(values, 0) for values in engine])
    finding = diagnose(rollouts).findings[0]
    assert finding.cause == "break" and finding.probability >= 0.5, finding
    named = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", finding.evidence)]
    assert any(abs(number - place) <= 8 for number in named), finding.evidence


def test_errors_of_one_size_have_no_break(plain: Drawn) -> None:
    random = np.random.default_rng(5)
    trainer = plain.scored()
    engine = [
        np.minimum(values - 0.01 * random.standard_normal(len(values)) * np.expm1(values), 0)
        for values in trainer
    ]
    assert diagnose(plain.rollouts(trainer, engine)).findings == ()
