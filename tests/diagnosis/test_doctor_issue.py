"""The doctor on real outputs of the shipped pair, with faults that are made here by other code than the doctor's."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rectangular_rollouts import rollouts_of
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.generation import logits_process as hf

from kleash.diagnosis import RolloutRecord, diagnose
from kleash.diagnosis.column_hypotheses import prediction_hypotheses
from kleash.diagnosis.model_hypotheses import SETTINGS
from kleash.diagnosis.model_scores import ModelScores
from kleash.diagnosis.residuals import healthy_scale
from kleash.diagnosis.token_table import tabulate
from kleash.leash import Mismatch, mismatch
from kleash.models import Pair, load_pair, read_prompts

Array = np.ndarray
PROMPT_TOKENS = 8
"""Of each prompt, so that all responses are drawn in one batch."""


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
        process: Callable[[Tensor, Tensor], Tensor] = lambda ids, logits: logits,
    ) -> None:
        self.pair, draw = pair, torch.Generator().manual_seed(0)
        read = read_prompts("shipped:prompts", pair, limit=responses)
        self.prompts = [prompt.token_ids[:PROMPT_TOKENS] for prompt in read]
        ids, cache, values = torch.tensor(self.prompts), DynamicCache(), list[Tensor]()
        for _ in range(tokens):
            with torch.inference_mode():
                # By place: the name of the cache differs between versions of transformers.
                output = pair.policy.network(ids[:, cache.get_seq_length() :], None, None, cache)
            logp = process(ids, output.logits[:, -1].float().clone()).log_softmax(-1)
            token = torch.multinomial(logp.exp(), 1, generator=draw)
            values.append(logp.gather(-1, token))
            ids = torch.cat([ids, token], dim=1)
        self.ids, self.responses = ids, ids[:, PROMPT_TOKENS:].tolist()
        self.processed = torch.cat(values, dim=1).double().numpy()

    def logits(self, role: str = "policy") -> Tensor:
        """Logits [responses, time, vocab] of a model's network as it is now."""
        with torch.no_grad():
            output = getattr(self.pair, role).network(input_ids=self.ids[:, :-1])
        return output.logits[:, PROMPT_TOKENS - 1 :].float()

    def scored(self, divisor: float = 1.0, dtype: torch.dtype = torch.float32, role: str = "policy") -> Array:
        """Log-probabilities [responses, time] of the tokens under a model's network as it is now."""
        logp = (self.logits(role).to(dtype).float() / divisor).log_softmax(-1)
        return logp.gather(-1, torch.tensor(self.responses).unsqueeze(-1)).squeeze(-1).double().numpy()

    def records(self, trainer: Array, engine: Array, reference: Array | None = None) -> list[RolloutRecord]:
        return rollouts_of(self.prompts, self.responses, trainer, engine, reference)


@pytest.fixture(scope="module")
def penalised(pair: Pair) -> Rollouts:
    processor: Any = hf.RepetitionPenaltyLogitsProcessor(1.1)
    return Rollouts(pair, 16, 40, processor)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Rollouts:
    return Rollouts(pair, 12, 40)


@pytest.fixture(scope="module")
def divided_and_cut(pair: Pair) -> Rollouts:
    """Divided, then cut, as by vLLM, which returns what it draws from."""
    warper: Any = hf.TopPLogitsWarper(0.8)
    return Rollouts(pair, 10, 24, lambda ids, logits: warper(ids, logits / 0.7))


def first_cause(rollouts: list[RolloutRecord], pair: Pair | None = None, **options: Any) -> Any:
    findings = diagnose(rollouts, pair=pair, **options).findings
    assert findings
    return findings[0]


def assert_weights_of_mean_1(trainer: Array, engine: Array) -> Mismatch:
    """Both columns are log-probabilities of the same tokens, and the engine drew them."""
    columns = torch.from_numpy(trainer), torch.from_numpy(engine)
    measured = mismatch(*columns, torch.ones(trainer.shape, dtype=torch.bool))
    low, high = measured.mean_weight.ci95
    assert low < 1 < high
    return measured


def counts(ids: Tensor, logits: Tensor) -> Tensor:
    """How often each token stands in the responses so far."""
    return torch.stack([torch.bincount(row[PROMPT_TOKENS:], minlength=logits.shape[-1]) for row in ids])


PROCESSES: dict[str, tuple[float, Any]] = {
    "top_k": (20, lambda ids, z: hf.TopKLogitsWarper(20)(ids, z / 0.7)),
    "min_p": (0.1, lambda ids, z: hf.MinPLogitsWarper(0.1)(ids, z / 0.7)),
    "tokens of prompt and": (1.2, lambda ids, z: hf.RepetitionPenaltyLogitsProcessor(1.2)(ids, z) / 0.7),
    "tokens of the": (1.2, lambda ids, z: z * torch.where(counts(ids, z) > 0, 1.2 ** -z.sign(), 1) / 0.7),
    "presence": (0.5, lambda ids, z: (z - 0.5 * (counts(ids, z) > 0)) / 0.7),
    "frequency": (0.5, lambda ids, z: (z - 0.5 * counts(ids, z)) / 0.7),
}
"""Words of a setting -> its value, and what vLLM makes of logits at a temperature of .7: penalties come before it."""


@pytest.mark.parametrize("words", PROCESSES)
def test_a_setting_makes_the_column_that_an_engine_makes(pair, words):
    value, process = PROCESSES[words]
    rollouts = Rollouts(pair, 4, 24, process)
    records = rollouts.records(rollouts.scored(), rollouts.processed)
    (transform_at,) = (setting[-1] for setting in SETTINGS if words in setting[1])
    for common, own in ((1.0, 0.7), (0.7, 1.0)):
        scores = replace(ModelScores.of(pair, records, tabulate(records)), temperature=common)
        transform = transform_at(scores, value, own)
        column = scores.column(lambda logits, rows, own=own, of=transform: of(logits / own, rows))
        np.testing.assert_allclose(column, rollouts.processed.ravel(), atol=1e-4)


def test_logits_that_an_engine_rounds_before_it_divides_them_are_named(plain, pair):
    records = plain.records(plain.scored(0.7), plain.scored(0.7, torch.bfloat16))
    finding = first_cause(records, pair, rounding="float32")
    assert finding.cause == "precision" and "with logits in bfloat16 for the engine" in finding.evidence


@pytest.mark.parametrize("has_models", [False, True])
@pytest.mark.parametrize("rounding", ["float32", "bfloat16"])
def test_values_after_a_repetition_penalty_are_a_penalty(penalised, pair, has_models, rounding):
    columns = penalised.scored(), penalised.processed
    finding = first_cause(penalised.records(*columns), pair if has_models else None, rounding=rounding)
    assert finding.cause == "penalty" and finding.probability > 0.5
    assert not has_models or "repetition penalty of 1.1" in finding.evidence
    measured = assert_weights_of_mean_1(*columns)
    k1, k3 = measured.kl_engine_trainer_k1, measured.kl_engine_trainer
    assert abs(k1.value - k3.value) < 3 * k1.standard_error


@pytest.mark.parametrize("trainer_at", [1.0, 0.7])
def test_a_temperature_and_a_cut_at_once_name_no_other_cause(divided_and_cut, pair, trainer_at):
    """The trainer is plain or divides alone."""
    rollouts = divided_and_cut
    records = rollouts.records(rollouts.scored(trainer_at), rollouts.processed)
    possible = {"truncation", "unexplained"} | ({"temperature"} if trainer_at == 1 else set())
    assert first_cause(records).cause in possible
    finding = first_cause(records, pair)
    assert finding.cause == "truncation"
    named = dict(re.findall(r"(top_p|temperature) ([\d.]+)", finding.evidence))
    assert float(named["top_p"]) == pytest.approx(0.8, abs=5e-3)
    assert trainer_at != 1 or float(named["temperature"]) == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize(("trainer_at", "alike"), [(1.004, ("processed",)), (0.7, ())])
def test_with_the_models_too_small_data_cannot_tell_two_causes_apart(plain, pair, trainer_at, alike):
    """Whether the tokens were drawn from the engine's values or from the trainer's."""
    finding = first_cause(plain.records(plain.scored(trainer_at), plain.scored()), pair, rounding="float32")
    assert (finding.cause, finding.alike) in {("temperature", alike), ("processed", ("temperature",))}
    assert finding.probability > 0.95 and (alike or finding.cause == "temperature")


def test_tokens_of_another_sampler_are_a_finding_where_the_columns_agree(penalised, pair):
    """The values are those of the plain policy, the tokens those of a repetition penalty of 1.1."""
    column = penalised.scored()
    finding = first_cause(penalised.records(column, column), pair)
    assert finding.cause == "sampler" and "standard errors" in finding.evidence
    without = diagnose(penalised.records(column, column))
    assert without.findings == ()
    assert "equal bit for bit" in without.notes[0] and "without" in without.notes[1]
    column[:, 5:12] = 0.0  # as at results of tools, which no sampler drew
    assert first_cause(penalised.records(column, column), pair).cause == "mask"


def test_a_temperature_of_both_columns_and_of_the_sampler_is_no_finding(pair):
    rollouts = Rollouts(pair, 12, 32, lambda ids, logits: logits / 0.7)
    divided, column = rollouts.scored(0.7), rollouts.scored()
    assert diagnose(rollouts.records(divided, divided), pair=pair).findings == ()
    assert first_cause(rollouts.records(column, column), pair).cause == "sampler"


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


def test_dropout_of_the_trainer_is_named_and_not_other_weights(plain, pair):
    engine, columns = plain.scored(), list[Array]()
    for seed in (0, 2):
        with dropout(pair, 0.1, seed):
            columns.append(plain.scored())
    assert first_cause(plain.records(columns[1], engine), pair).cause == "dropout"
    alone = first_cause(plain.records(columns[1], engine))
    assert "dropout" in (alone.cause, *alone.alike), "without the models it looks like other weights"
    assert_weights_of_mean_1(columns[0], engine)
    correlation = np.corrcoef([(column - engine).ravel() for column in columns])[0, 1]
    assert abs(correlation) < 0.1, "as the plant should be"


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
        pair.policy.network.load_state_dict(saved, strict=False)


@pytest.mark.parametrize("is_of_trainer", [False, True])
def test_stale_weights_are_told_from_dropout_on_either_side(plain, pair, is_of_trainer):
    base = dict(pair.reference.network.named_parameters())
    with changed(pair, lambda name, weight: weight.lerp(base[name].detach(), 0.5)):
        stale = plain.scored()
    columns = (stale, plain.scored()) if is_of_trainer else (plain.scored(), stale)
    assert first_cause(plain.records(*columns), pair).cause == "weights"


@pytest.mark.parametrize("part", ["mlp.down_proj", "layers.3."])
def test_modules_that_were_left_out_are_named(plain, pair, part):
    """One kind in all layers, or all kinds in one layer."""
    base = dict(pair.reference.network.named_parameters())
    with changed(pair, lambda name, weight: base[name].detach() if part in name else weight):
        engine = plain.scored()
    finding = first_cause(plain.records(plain.scored(), engine), pair)
    assert finding.cause == "modules" and part in finding.evidence


def test_the_likeliest_tokens_log_probability_is_a_column_of_other_tokens(plain, pair):
    likeliest = plain.logits().log_softmax(-1).amax(-1).double().numpy()
    finding = first_cause(plain.records(plain.scored(), likeliest), pair)
    assert finding.cause == "column" and "the likeliest token's" in finding.evidence


@pytest.mark.parametrize(("more", "words"), [(1, "before the prompt"), (-1, "without its first token")])
def test_prompts_that_one_side_reads_otherwise_are_named(plain, pair, more, words, monkeypatch):
    ids, trainer = pad(plain.ids, (more, 0), value=pair.tokenizer.eos_token_id), plain.scored()
    logits = pair.policy.network(ids[:, :-1]).logits.detach()[:, -len(plain.responses[0]) :]
    monkeypatch.setattr(plain, "logits", lambda role: logits)
    finding = first_cause(plain.records(trainer, plain.scored()), pair)
    assert finding.cause == "context" and words in finding.evidence


def test_a_reference_column_of_the_policy_is_named_with_the_models_alone(plain, pair):
    """Without them it may be the first step, where it is right: a note."""
    column = plain.scored()
    assert first_cause(plain.records(column, column, column), pair).cause == "reference"
    diagnosis = diagnose(plain.records(column, column, column))
    assert diagnosis.findings == () and any("first update" in note for note in diagnosis.notes)


@pytest.mark.parametrize(
    ("seen", "of_reference", "is_named"), [(3e-3, 4e-2, True), (2e-2, 3e-2, False), (0.0, 1.5e-2, False)]
)
def test_a_reference_column_is_as_exact_as_the_others(plain, pair, seen, of_reference, is_named):
    """All but .04 is within what bfloat16 explains; the last reference runs in it, and the policy in float32."""
    trainer, reference, draw = plain.scored(), plain.scored(role="reference"), np.random.default_rng(5)

    def rounded(column: Array, size: float) -> Array:
        return np.minimum(column - np.expm1(column) * size * draw.standard_normal(column.shape), 0)

    records = plain.records(trainer, rounded(trainer, seen), rounded(reference, of_reference))
    findings = diagnose(records, pair=pair, rounding="bfloat16").findings
    assert [finding.cause for finding in findings] == ["reference"] * is_named


def test_columns_that_differ_at_few_tokens_make_no_warning(plain, pair):
    """Warnings are errors here: nothing is divided by a median or mean of 0, and no mean is of nothing."""
    trainer, engine = plain.scored(), plain.scored()
    engine[-1, -1] = min(engine[-1, -1] + 1e-4, 0.0)
    assert diagnose(plain.records(trainer, engine), pair=pair).findings == ()
    engine[-1, -1] = trainer[-1, -1] - 20
    assert not {each.cause for each in diagnose(plain.records(trainer, engine)).findings} & {"temperature"}


class Synthetic:
    """Log-probabilities of tokens of peaked distributions."""

    def __init__(self, responses: int, tokens: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.column = np.log(self.random.beta(1.2, 0.6, (responses, tokens)))
        self.prompts = [list(range(length)) for length in self.random.integers(5, 40, responses)]
        self.responses = self.random.integers(0, 500, (responses, tokens)).tolist()

    def noisy(self, scale: Callable[[Array, Array], Any]) -> Array:
        """The column with errors of the logits of a size for each position and prompt length."""
        starts = np.array([len(prompt) for prompt in self.prompts])[:, None]
        noise = -np.expm1(self.column) * self.random.standard_normal(self.column.shape)
        return np.minimum(self.column + scale(np.arange(self.column.shape[1]), starts) * noise, 0.0)

    def records(self, trainer: Array, engine: Array) -> list[RolloutRecord]:
        return rollouts_of(self.prompts, self.responses, trainer, engine)


def test_a_cut_of_little_mass_at_every_token_is_no_other_weights():
    """The kept mass varies about a value, so the gaps have a shape like errors of both signs, but one sign."""
    world = Synthetic(120, 60)
    mass = 0.06 * np.exp(0.5 * world.random.standard_normal(world.column.shape))
    engine = world.noisy(lambda position, _: 0.005) + np.minimum(mass, -0.5 * np.expm1(world.column))
    finding = first_cause(world.records(world.column, np.minimum(engine, 0)))
    assert finding.cause == "truncation" and finding.probability > 0.5


def test_other_weights_that_favour_repetition_are_no_penalty():
    """Tokens that stand before are higher by more than the noise, all others lower, but not all of them."""
    world = Synthetic(60, 60)
    is_seen = np.array([[token in row[:place] for place, token in enumerate(row)] for row in world.responses])
    engine = world.noisy(lambda position, _: 0.2) + np.where(is_seen, 0.2, -0.1) * -np.expm1(world.column)
    assert first_cause(world.records(world.column, np.minimum(engine, 0))).cause in ("weights", "unexplained")


def test_large_errors_of_the_last_tokens_are_no_insertion():
    """A shift that predicts no token of a response would explain them."""
    world = Synthetic(60, 80)
    engine = world.noisy(lambda position, _: 0.003)
    engine[5, -4:] += 0.3 * np.expm1(world.column[5, -4:])
    table = tabulate(world.records(world.column, engine))
    causes = {each.cause for each in prediction_hypotheses(table, healthy_scale("bfloat16"))}
    assert "shift" in causes and "insertion" not in causes


def test_padding_that_is_left_out_is_no_second_cause():
    """Responses of all lengths, so that some have one or two tokens of padding."""
    world = Synthetic(60, 40)
    engine = world.noisy(lambda position, _: 0.005)
    is_padding = np.arange(40) >= np.arange(60)[:, None] % 20 + 21
    columns = np.where(is_padding, 0.0, world.column), np.where(is_padding, -1.0, engine)
    world.responses = np.where(is_padding, 1, world.responses).tolist()
    (finding,) = diagnose(world.records(*columns)).findings
    assert finding.cause == "mask" and f"{is_padding.sum()} tokens" in finding.evidence
    world.responses = world.random.integers(0, 2, (60, 40)).tolist()
    nothing = diagnose(world.records(0 * world.column, 0 * world.column))
    assert not nothing.examined and "0 tokens are too few" in nothing.notes[0], "what is left counts"


@pytest.mark.parametrize(
    ("place", "sizes", "of_prompt"),
    [*((place, (0.01, 0.1), 0) for place in (16, 96, 160)), (96, (0.1, 0.01), 0), (64, (0.01, 0.1), 1)],
)
def test_a_break_is_named_with_its_position_in_the_response_or_the_sequence(place, sizes, of_prompt):
    world = Synthetic(64, 128 if of_prompt else 192)
    engine = world.noisy(lambda position, prompt: np.where(position + of_prompt * prompt < place, *sizes))
    finding = first_cause(world.records(world.column, engine))
    assert finding.cause == "break"
    assert ("of the sequence" if of_prompt else "of the response") in finding.evidence
    assert abs(int(finding.evidence.split("from token ")[1].split()[0]) - place) <= 8


def test_errors_of_one_size_have_no_break():
    world = Synthetic(64, 192)
    assert diagnose(world.records(world.column, world.noisy(lambda position, _: 0.01))).findings == ()


@pytest.mark.parametrize("share", [1, 8])
@pytest.mark.parametrize(("is_deletion", "is_of_trainer"), [(False, False), (True, True)])
def test_a_token_more_or_less_inside_responses_is_an_insertion(share, is_deletion, is_of_trainer):
    world = Synthetic(32, 64, seed=share)
    moved = world.noisy(lambda position, _: 1e-3)
    rows = moved[::share]
    ends = np.full((len(rows), 1), -1.0)
    parts = [rows[:, :30], rows[:, 31:], ends] if is_deletion else [rows[:, :30], ends, rows[:, 30:-1]]
    moved[::share] = np.concatenate(parts, axis=1)
    columns = (moved, world.column) if is_of_trainer else (world.column, moved)
    finding = first_cause(world.records(*columns))
    assert finding.cause == "insertion" and f"{32 // share} of" in finding.evidence
