"""The doctor on real outputs of the shipped pair, with faults that are made here by other code than the doctor's."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from kleash.diagnosis import RolloutRecord, diagnose
from kleash.models import Pair, load_pair, read_prompts

Column = list[np.ndarray]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("shipped:policy", "shipped:reference", dtype="float32")


class Rollouts:
    """Responses drawn token by token from the policy's logits after a processor, and the logits without it."""

    def __init__(
        self,
        pair: Pair,
        responses: int,
        tokens: int,
        process: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.pair, draw = pair, torch.Generator().manual_seed(0)
        self.prompts = [prompt.token_ids for prompt in read_prompts("shipped:prompts", pair, limit=responses)]
        self.responses: list[list[int]] = []
        self.processed: Column = []
        for prompt in self.prompts:
            ids, cache, values = torch.tensor([prompt]), None, list[float]()
            for _ in range(tokens):
                with torch.inference_mode():
                    new = ids if cache is None else ids[:, -1:]
                    output = pair.policy.network(input_ids=new, past_key_values=cache, use_cache=True)
                cache, logits = output.past_key_values, output.logits[:, -1].float()
                logp = (logits if process is None else process(ids, logits)).log_softmax(-1)
                token = torch.multinomial(logp.exp(), 1, generator=draw)
                values.append(float(logp[0, token]))
                ids = torch.cat([ids, token], dim=1)
            self.responses.append(ids[0, len(prompt) :].tolist())
            self.processed.append(np.array(values))

    def logits(self) -> list[Tensor]:
        """Logits of the policy's network as it is now at the tokens of each response."""
        rows: list[Tensor] = []
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            with torch.no_grad():
                output = self.pair.policy.network(input_ids=torch.tensor([[*prompt, *response[:-1]]]))
            rows.append(output.logits[0, len(prompt) - 1 :].float())
        return rows

    def scored(self, change: Callable[[Tensor], Tensor] = lambda logits: logits) -> Column:
        """Log-probabilities of the tokens under the policy's network as it is now."""
        return [
            change(logits).log_softmax(-1)[range(len(response)), response].double().numpy()
            for logits, response in zip(self.logits(), self.responses, strict=True)
        ]

    def records(
        self, trainer: Column, engine: Column, reference: Column | None = None
    ) -> list[RolloutRecord]:
        return records(self.prompts, self.responses, trainer, engine, reference)


def records(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    trainer: Column,
    engine: Column,
    reference: Column | None = None,
) -> list[RolloutRecord]:
    return [
        RolloutRecord(
            prompt_ids=tuple(prompts[number]),
            response_ids=tuple(responses[number]),
            trainer=trainer[number],
            engine=engine[number],
            reference=None if reference is None else reference[number],
            is_counted=np.ones(len(responses[number]), dtype=bool),
            location=f"response {number}",
        )
        for number in range(len(responses))
    ]


@pytest.fixture(scope="module")
def penalised(pair: Pair) -> Rollouts:
    processor = RepetitionPenaltyLogitsProcessor(1.1)
    return Rollouts(pair, 24, 40, lambda ids, logits: processor(ids, logits.clone()))


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Rollouts:
    return Rollouts(pair, 16, 40)


def first_cause(rollouts: list[RolloutRecord], pair: Pair | None = None, **options: Any) -> Any:
    findings = diagnose(rollouts, pair=pair, **options).findings
    assert findings
    return findings[0]


@pytest.mark.parametrize("has_models", [False, True])
@pytest.mark.parametrize("rounding", ["float32", "bfloat16"])
def test_an_engine_that_reports_after_a_repetition_penalty_is_a_penalty(
    penalised: Rollouts, pair: Pair, has_models: bool, rounding: str
) -> None:
    rollouts = penalised.records(penalised.scored(), penalised.processed)
    finding = first_cause(rollouts, pair if has_models else None, rounding=rounding)
    assert finding.cause == "penalty" and finding.probability > 0.5
    assert not has_models or "repetition penalty of 1.1" in finding.evidence


@pytest.fixture(scope="module")
def cut(pair: Pair) -> Rollouts:
    """At a temperature of 0.7 and with a top_p of 0.8, as vLLM processes logits: divided, then cut."""
    warper: Any = TopPLogitsWarper(0.8)
    return Rollouts(pair, 24, 40, lambda ids, logits: warper(ids, logits / 0.7))


@pytest.mark.parametrize("trainer_at", [1.0, 0.7])
@pytest.mark.parametrize("has_models", [False, True])
def test_a_temperature_and_a_cut_at_once_name_no_other_cause(
    cut: Rollouts, pair: Pair, trainer_at: float, has_models: bool
) -> None:
    """The engine returns what it draws from; the trainer is plain, or divides by the temperature alone."""
    trainer = cut.scored(lambda logits: logits / trainer_at)
    finding = first_cause(cut.records(trainer, cut.processed), pair if has_models else None)
    possible = {"truncation", "unexplained"} | ({"temperature"} if trainer_at == 1 else set())
    assert finding.cause in possible
    if has_models:
        assert finding.cause == "truncation" and "top_p 0.8" in finding.evidence
        named = re.findall(r"at temperature ([\d.]+)", finding.evidence)
        assert trainer_at != 1 or float(named[0]) == pytest.approx(0.7, abs=0.02)


def test_tokens_of_another_sampler_are_a_finding_where_the_columns_agree(
    penalised: Rollouts, pair: Pair
) -> None:
    """The values are those of the plain policy, the tokens those of a repetition penalty of 1.1."""
    column = penalised.scored()
    finding = first_cause(penalised.records(column, column), pair)
    assert finding.cause == "sampler" and "standard errors" in finding.evidence
    without = diagnose(penalised.records(column, column))
    assert without.findings == () and any("without the models" in note for note in without.notes)


def test_a_temperature_of_both_columns_and_of_the_sampler_is_no_finding(pair: Pair) -> None:
    rollouts = Rollouts(pair, 12, 32, lambda ids, logits: logits / 0.7)
    column = rollouts.scored(lambda logits: logits / 0.7)
    assert diagnose(rollouts.records(column, column), pair=pair).findings == ()
    finding = first_cause(rollouts.records(rollouts.scored(), rollouts.scored()), pair)
    assert finding.cause == "sampler"


@contextmanager
def dropout(pair: Pair, share: float, seed: int) -> Iterator[None]:
    """Context in which dropout acts on what attention and MLP add."""
    draw = torch.Generator().manual_seed(seed)

    def drop(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output * (torch.rand(output.shape, generator=draw) >= share) / (1 - share)

    modules = pair.policy.network.named_modules()
    hooks = [each.register_forward_hook(drop) for name, each in modules if name.endswith(("mlp", "o_proj"))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def test_dropout_of_the_trainer_is_named_and_not_other_weights(plain: Rollouts, pair: Pair) -> None:
    engine, columns = plain.scored(), list[np.ndarray]()
    for seed in (0, 1):
        with dropout(pair, 0.1, seed):
            trainer = plain.scored()
        columns.append(np.concatenate(trainer) - np.concatenate(engine))
    assert first_cause(plain.records(trainer, engine), pair).cause == "dropout"
    alone = first_cause(plain.records(trainer, engine))
    assert "dropout" in (alone.cause, *alone.alike), "without the models it looks like other weights"
    assert abs(np.corrcoef(columns)[0, 1]) < 0.1, "as the plant should be"


@contextmanager
def changed(pair: Pair, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Context in which the policy's network has other weights."""
    weights = dict(pair.policy.network.named_parameters())
    saved = {name: weight.detach().clone() for name, weight in weights.items()}
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(change(name, weight.detach()))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(saved[name])


@pytest.mark.parametrize("is_of_trainer", [False, True])
def test_stale_weights_are_told_from_dropout_on_either_side(
    plain: Rollouts, pair: Pair, is_of_trainer: bool
) -> None:
    base = dict(pair.reference.network.named_parameters())
    with changed(pair, lambda name, weight: weight.lerp(base[name].detach(), 0.5)):
        stale = plain.scored()
    columns = (stale, plain.scored()) if is_of_trainer else (plain.scored(), stale)
    assert first_cause(plain.records(*columns), pair).cause == "weights"


@pytest.mark.parametrize("part", ["mlp.down_proj", "layers.3."])
def test_modules_that_were_left_out_are_named(plain: Rollouts, pair: Pair, part: str) -> None:
    """One kind in all layers, or all kinds in one layer."""
    base = dict(pair.reference.network.named_parameters())
    with changed(pair, lambda name, weight: base[name].detach() if part in name else weight):
        engine = plain.scored()
    finding = first_cause(plain.records(plain.scored(), engine), pair)
    assert finding.cause == "modules" and part in finding.evidence


def test_the_likeliest_tokens_log_probability_is_a_column_of_other_tokens(
    plain: Rollouts, pair: Pair
) -> None:
    likeliest = [logits.log_softmax(-1).max(-1).values.double().numpy() for logits in plain.logits()]
    finding = first_cause(plain.records(plain.scored(), likeliest), pair)
    assert finding.cause == "column" and "the likeliest token's" in finding.evidence


def test_a_reference_column_of_the_policy_is_named_with_the_models_alone(plain: Rollouts, pair: Pair) -> None:
    """Without them it may be the first step, where it is right: a note."""
    column = plain.scored()
    assert first_cause(plain.records(column, column, column), pair).cause == "reference"
    diagnosis = diagnose(plain.records(column, column, column))
    assert diagnosis.findings == () and any("first update" in note for note in diagnosis.notes)


def test_columns_that_differ_at_few_tokens_make_no_warning(plain: Rollouts, pair: Pair) -> None:
    """Warnings are errors here: nothing is divided by a median of 0, and no mean is of nothing."""
    trainer, engine = plain.scored(), plain.scored()
    engine[-1][-1] = min(engine[-1][-1] + 1e-4, 0.0)
    assert diagnose(plain.records(trainer, engine), pair=pair).findings == ()


class Synthetic:
    """Log-probabilities of tokens of peaked distributions."""

    def __init__(self, responses: int, tokens: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.column = [np.log(self.random.beta(1.2, 0.6, tokens)) for _ in range(responses)]
        self.prompts = [list(range(int(self.random.integers(5, 40)))) for _ in range(responses)]
        self.responses = [self.random.integers(0, 500, tokens).tolist() for _ in range(responses)]

    def noisy(self, scale: Callable[[np.ndarray, int], Any]) -> Column:
        """The column with errors of the logits of a size for each position and prompt length."""
        return [
            np.minimum(
                values
                + scale(np.arange(len(values)), len(prompt))
                * -np.expm1(values)
                * self.random.standard_normal(len(values)),
                0.0,
            )
            for values, prompt in zip(self.column, self.prompts, strict=True)
        ]

    def records(self, trainer: Column, engine: Column) -> list[RolloutRecord]:
        return records(self.prompts, self.responses, trainer, engine)


def test_a_cut_of_little_mass_at_every_token_is_no_other_weights() -> None:
    """The kept mass varies about a value, so the gaps have a shape like errors of both signs, but one sign."""
    world = Synthetic(120, 60)
    engine = [
        values
        + np.minimum(0.06 * np.exp(0.5 * world.random.standard_normal(len(values))), -0.5 * np.expm1(values))
        for values in world.noisy(lambda position, _: 0.005)
    ]
    finding = first_cause(world.records(world.column, [np.minimum(values, 0) for values in engine]))
    assert finding.cause == "truncation" and finding.probability > 0.5


@pytest.mark.parametrize("place", [16, 96, 160])
@pytest.mark.parametrize("sizes", [(0.01, 0.1), (0.1, 0.01)])
def test_a_break_is_named_with_its_position(place: int, sizes: tuple[float, float]) -> None:
    world = Synthetic(64, 192)
    engine = world.noisy(lambda position, _: np.where(position < place, *sizes))
    finding = first_cause(world.records(world.column, engine))
    assert finding.cause == "break" and "of the response" in finding.evidence
    assert abs(int(finding.evidence.split("from token ")[1].split()[0]) - place) <= 8


def test_errors_of_one_size_have_no_break() -> None:
    world = Synthetic(64, 192)
    assert diagnose(world.records(world.column, world.noisy(lambda position, _: 0.01))).findings == ()


def test_a_break_of_the_sequence_is_told_from_one_of_the_response() -> None:
    world = Synthetic(64, 128)
    engine = world.noisy(lambda position, prompt: np.where(position + prompt < 64, 0.01, 0.1))
    finding = first_cause(world.records(world.column, engine))
    assert finding.cause == "break" and "of the sequence" in finding.evidence
    assert abs(int(finding.evidence.split("from token ")[1].split()[0]) - 64) <= 8


@pytest.mark.parametrize("share", [1, 8])
@pytest.mark.parametrize("is_deletion", [False, True])
@pytest.mark.parametrize("is_of_trainer", [False, True])
def test_a_token_more_or_less_inside_responses_is_an_insertion(
    share: int, is_deletion: bool, is_of_trainer: bool
) -> None:
    world = Synthetic(32, 64, seed=share)
    changed = [
        (np.r_[values[:30], values[31:], -1.0] if is_deletion else np.r_[values[:30], -1.0, values[30:-1]])
        if number % share == 0
        else values
        for number, values in enumerate(world.noisy(lambda position, _: 1e-3))
    ]
    columns = (changed, world.column) if is_of_trainer else (world.column, changed)
    finding = first_cause(world.records(*columns))
    assert finding.cause == "insertion" and f"{32 // share} of" in finding.evidence
