"""The doctor on synthetic distributions, whose every fault is known, on samples of them, and as a command."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from rectangular_rollouts import rollouts_of
from scipy.special import log_softmax

from kleash.cli import main
from kleash.diagnosis import RolloutRecord, diagnose, read_rollouts, residuals
from kleash.diagnosis.causes import CAUSES
from kleash.diagnosis.residuals import DISTINCT, MACHINE_EPSILON, SCALE, healthy_scale, most
from kleash.diagnosis.token_table import sample_rollouts
from kleash.errors import OptionError, SourceError
from kleash.jobs.reading_jobs import DoctorJob

SEQUENCES, TIME, VOCAB = 20, 30, 60
Array = np.ndarray


class World:
    """Logits of a model at every position, and tokens drawn from it at temperature 1."""

    def __init__(self, seed: int, temperature: float = 1.0) -> None:
        self.random = np.random.default_rng(seed)
        self.logits = 3 * self.random.standard_normal((SEQUENCES * TIME, VOCAB))
        self.tokens = self.draw(self.logits / temperature)
        self.position = np.tile(np.arange(TIME), SEQUENCES)

    def draw(self, logits: Array) -> Array:
        return (logits + self.random.gumbel(size=logits.shape)).argmax(-1)

    def logp(self, logits: Array) -> Array:
        return np.take_along_axis(log_softmax(logits, axis=-1), self.tokens[:, None], axis=1)[:, 0]

    def noisy(self, scale: Any) -> Array:
        return self.logp(self.logits + scale * self.random.standard_normal(self.logits.shape))

    def rollouts(self, trainer: Array, engine: Array) -> list[RolloutRecord]:
        columns = (column.reshape(SEQUENCES, TIME) for column in (self.tokens, trainer, engine))
        return rollouts_of([[number] for number in range(SEQUENCES)], *columns)


def at_temperature(value: float) -> Callable[["World"], tuple[Array, Array]]:
    return lambda world: (world.logp(world.logits), world.logp(world.logits / value))


temperature = at_temperature(0.7)


def raw_logits(world: World) -> tuple[Array, Array]:
    return world.logp(world.logits), np.take_along_axis(world.logits, world.tokens[:, None], axis=1)[:, 0]


def cut_to(world: World, kept: Array) -> tuple[Array, Array]:
    """The engine draws from the tokens that are kept, in bfloat16, where rounding hides small differences."""
    world.tokens = world.draw(np.where(kept, world.logits, -np.inf))
    noisy = world.logits + 0.01 * world.random.standard_normal(world.logits.shape)
    return world.logp(world.logits), world.logp(np.where(kept, noisy, -np.inf))


def top_p(world: World) -> tuple[Array, Array]:
    """The likeliest tokens that hold 90 %."""
    p = np.exp(log_softmax(world.logits, axis=-1))
    order = np.argsort(-p, axis=-1)
    before = np.take_along_axis(p, order, -1).cumsum(-1) - np.take_along_axis(p, order, -1)
    kept = np.zeros_like(p, dtype=bool)
    np.put_along_axis(kept, order, before < 0.9, -1)
    return cut_to(world, kept)


def top_k(world: World) -> tuple[Array, Array]:
    return cut_to(world, world.logits >= np.sort(world.logits)[:, -4][:, None])


def min_p(world: World) -> tuple[Array, Array]:
    return cut_to(world, world.logits >= world.logits.max(-1, keepdims=True) + np.log(0.3))


def logit_bias(world: World) -> tuple[Array, Array]:
    """The engine adds half a nat to the logits of ten tokens; all others lose one constant at each position."""
    biased = world.logits + 0.5 * (np.arange(VOCAB) < 10)
    world.tokens = world.draw(biased)
    return world.logp(world.logits), world.logp(biased)


def shift(world: World, by: int = 1) -> tuple[Array, Array]:
    column = world.logp(world.logits)
    return column, np.roll(column.reshape(SEQUENCES, TIME), by, axis=1).ravel()


def padding(world: World) -> tuple[Array, Array]:
    trainer, is_padding = world.logp(world.logits), (world.position >= 22)
    return trainer, np.where(is_padding, 0.0, trainer)


def another_prompt(world: World) -> tuple[Array, Array]:
    return world.logp(world.logits), world.noisy((1.5 / (1 + world.position / 3))[:, None])


def other_weights(world: World) -> tuple[Array, Array]:
    """Every logit moves, by amounts that differ from position to position."""
    size = np.exp(world.random.standard_normal((len(world.logits), 1)))
    return world.logp(world.logits), world.noisy(0.3 * size)


def stored_as(dtype: torch.dtype) -> Callable[[World], tuple[Array, Array]]:
    return lambda world: (world.noisy(0), torch.from_numpy(world.noisy(0)).to(dtype).double().numpy())


def other_experts(world: World) -> tuple[Array, Array]:
    is_moved = world.random.random((len(world.logits), 1)) < 0.2
    return world.logp(world.logits), world.noisy(0.005 + 0.4 * is_moved)


def missing_shard(world: World) -> tuple[Array, Array]:
    is_broken = world.random.random((len(world.logits), 1)) < 0.008
    return world.logp(world.logits), world.noisy(0.005 + 5 * is_broken)


def errors(size: Any) -> Callable[[World], tuple[Array, Array]]:
    """As of weights in 8 bits: errors on all tokens that neither shrink nor leave a share far out."""
    return lambda world: (world.logp(world.logits), world.noisy(size))


def errors_of_one_size(world: World) -> tuple[Array, Array]:
    """They leave a token changed that is nearly certain, unlike those of logits, and are no share far out."""
    trainer = world.logp(world.logits)
    return trainer, np.minimum(trainer + 0.02 * world.random.standard_normal(len(trainer)), 0)


def placeholders(value: float, at: int = 15) -> Callable[[World], tuple[Array, Array]]:
    """Their differences are as large as those of another model, so only that they repeat gives them away."""
    return lambda world: (world.logp(world.logits), np.where(world.position >= at, value, world.noisy(0.02)))


FAULTS: dict[str, tuple[str, Callable[[World], tuple[Array, Array]]]] = {
    "temperature": ("temperature", temperature),
    "raw logits": ("processed", raw_logits),
    "top-p": ("truncation", top_p),
    "top-k": ("truncation", top_k),
    "min-p": ("truncation", min_p),
    "a logit bias": ("penalty", logit_bias),
    "a shifted column": ("shift", shift),
    "a shift of three": ("shift", partial(shift, by=-3)),
    "padding that counts": ("mask", padding),
    "placeholders of -3": ("mask", placeholders(-3.0)),
    "end tokens without a value": ("mask", placeholders(0.0, at=TIME - 1)),
    "another prompt": ("context", another_prompt),
    "other weights": ("weights", other_weights),
    "small errors": ("weights", errors(0.06)),
    "errors of a cache": ("weights", errors(0.3 * (np.arange(SEQUENCES * TIME) % TIME > 0)[:, None])),
    "errors of one size": ("weights", errors_of_one_size),
    "log-probabilities in bfloat16": ("precision", stored_as(torch.bfloat16)),
    "log-probabilities in float16": ("precision", stored_as(torch.float16)),
    "other experts": ("routing", other_experts),
    "a missing shard": ("tensor_parallel", missing_shard),
}
ALIKE = {"temperature": "processed", "raw logits": "column", "small errors": "precision"}
"""A cause that the columns alone cannot tell from the one of a fault."""
OF_THE_ENGINE = ("raw logits", "top-p", "top-k", "min-p", "a logit bias")
"""Faults of the side that draws."""


@pytest.mark.parametrize("is_of_trainer", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_first_without_models(fault, is_of_trainer):
    cause, plant = FAULTS[fault]
    if is_of_trainer and fault in OF_THE_ENGINE:
        return
    value = 0.7 if fault == "temperature" else 1.0
    columns = plant(world := World(7 if is_of_trainer else 2, temperature=value))
    first = diagnose(world.rollouts(*columns[:: -1 if is_of_trainer else 1])).findings[0]
    assert first.cause == cause and first.probability > 0.6 and first.next_test == CAUSES[cause].next_test
    assert fault not in ALIKE or ALIKE[fault] in first.alike
    kept = re.findall(r"as after a cut that keeps ([\d.]+) %", first.evidence)
    assert fault != "top-p" or 90 < float(kept[0]) < 97


OTHER_COLUMNS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "base 2": ("logarithms to base 2", lambda logp: logp / np.log(2)),
    "base 10": ("logarithms to base 10", lambda logp: logp / np.log(10)),
    "probabilities": ("probabilities, not their logarithms", np.exp),
    "negative": ("negative log-likelihoods", np.negative),
    "ranks": ("ranks of the tokens", lambda logp: np.floor(np.exp(-logp))),
    "zeros": ("are all 0: the column was not filled in, or that side is greedy", np.zeros_like),
    "means of responses": (
        "one number for each response",
        lambda logp: logp.reshape(SEQUENCES, TIME).mean(1).repeat(TIME),
    ),
    "entropies": ("they are logits", lambda logp: 2 - 0.2 * logp + np.sin(np.arange(len(logp)))),
    "other responses": ("do not depend on each other", lambda logp: np.roll(logp, TIME)),
}


@pytest.mark.parametrize("kind", OTHER_COLUMNS)
def test_a_column_that_is_not_of_log_probabilities_is_named_by_what_it_holds(kind):
    """Temperature or truncation would be likelier than any other cause of an unknown column."""
    evidence, change = OTHER_COLUMNS[kind]
    world = World(3)
    trainer, engine = world.logp(world.logits), world.noisy(0.005)
    for columns in ((trainer, change(engine)), (change(engine), trainer)):
        finding = diagnose(world.rollouts(*columns)).findings[0]
        assert finding.cause == "column" and evidence in finding.evidence


def in_bfloat16(column: Array) -> Array:
    return torch.from_numpy(column).bfloat16().double().numpy()


def two_kernels(world: World) -> Array:
    return np.where(world.random.random(len(world.tokens)) < 0.3, 0.03, 0.003)


HEALTHY_NOISE: dict[str, Callable[[World], Any]] = {
    "heavy tails": lambda world: 0.005 / np.sqrt(world.random.chisquare(2, len(world.tokens)) / 2),
    "two kernels": two_kernels,
    "half of the tokens equal": lambda world: 0.01 * (world.random.random(len(world.tokens)) < 0.5),
    "shrinking": lambda world: 0.03 / (1 + world.position / 3),
    "of the largest size": lambda _: 0.03,
    "one response not equal bit for bit": lambda _: 0.02 * (np.arange(SEQUENCES * TIME) < TIME),
    "two responses noisier than the rest": lambda _: np.repeat([0.1, 0.01], [2 * TIME, 18 * TIME]),
}
"""The size of each token's errors of its logits."""


@pytest.mark.parametrize("kind", HEALTHY_NOISE)
def test_rounding_that_varies_among_tokens_is_healthy(kind):
    """Errors of logits below those that bfloat16 explains, in any mixture: not some tokens' experts or prompts."""
    world = World(0)
    trainer = world.logp(world.logits)
    errors = HEALTHY_NOISE[kind](world) * world.random.standard_normal(len(trainer))
    engine = np.minimum(trainer - np.expm1(trainer) * errors, 0)
    assert diagnose(world.rollouts(trainer, engine)).findings == ()


def test_columns_of_bfloat16_numbers_on_both_sides_are_a_note_and_no_finding():
    """Rounding of unlikely tokens is far above that of logits, and was taken for routing."""
    world = World(0)
    columns = in_bfloat16(world.logp(world.logits)), in_bfloat16(world.noisy(0.01))
    diagnosis = diagnose(world.rollouts(*columns))
    assert diagnosis.findings == () and any("16-bit numbers" in note for note in diagnosis.notes)


@pytest.mark.parametrize("fault", ["temperature", "top-p", "a shifted column", "padding that counts"])
def test_a_column_of_bfloat16_numbers_hides_no_other_fault(fault):
    cause, plant = FAULTS[fault]
    world = World(5)
    trainer, engine = plant(world)
    both = diagnose(world.rollouts(in_bfloat16(trainer), in_bfloat16(engine))).findings
    assert both[0].cause == cause and all(finding.cause != "precision" for finding in both)
    first, *_, last = diagnose(world.rollouts(trainer, in_bfloat16(engine))).findings
    assert first.cause == cause and last.cause == "precision" and "bfloat16 numbers" in last.evidence
    (only,) = diagnose(world.rollouts(trainer, in_bfloat16(raw_logits(world)[1] - 5))).findings
    assert only.cause == "processed", "logits are no log-probabilities that are rounded"


@pytest.mark.parametrize(
    ("cause", "plant"), [("shift", shift), ("weights", other_weights), ("temperature", temperature)]
)
def test_a_fault_of_some_responses_is_named_with_their_number(cause, plant):
    world = World(7)
    trainer, faulty = plant(world)
    is_faulty = np.repeat(np.arange(SEQUENCES) < 6, TIME)
    engine = np.where(is_faulty, faulty, trainer)
    finding = diagnose(world.rollouts(trainer, engine)).findings[0]
    assert finding.cause == cause and f"in 6 of {SEQUENCES} responses" in finding.evidence


def test_tokens_of_probability_0_are_few_tokens_far_out_and_a_note():
    world = World(8)
    trainer, engine = world.noisy(0.005), world.logp(world.logits)
    trainer[[17, 400]] = -np.inf
    diagnosis = diagnose(world.rollouts(trainer, engine))
    assert diagnosis.findings[0].cause == "tensor_parallel"
    assert "the trainer gives a probability of 0 to 2 tokens that the engine drew" in diagnosis.notes
    for value in (-np.inf, -1e300):
        trainer[::50] = value
        assert diagnose(world.rollouts(trainer, engine)).findings[0].cause in ("tensor_parallel", "routing")
    assert diagnose(world.rollouts(np.full_like(trainer, -np.inf), engine)).findings
    same = np.zeros(SEQUENCES * TIME)
    assert diagnose(world.rollouts(same, same)).findings == (), "an engine that is certain of every token"


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.4])
@pytest.mark.parametrize("is_of_trainer", [False, True])
def test_the_ratio_of_temperatures_is_named_without_models(temperature, is_of_trainer):
    columns = at_temperature(temperature)(world := World(4, temperature=temperature))
    finding = diagnose(world.rollouts(*columns[:: -1 if is_of_trainer else 1])).findings[0]
    assert finding.cause == "temperature"
    sharper = ("trainer", "engine")[(temperature < 1) ^ is_of_trainer]
    (ratio,) = re.findall(rf"the {sharper} is the sharper one, as at about ([\d.]+) times", finding.evidence)
    assert float(ratio) == pytest.approx(min(temperature, 1 / temperature), rel=0.2)


def test_a_temperature_near_1_is_named_where_rounding_is_that_of_float32():
    columns = at_temperature(0.99)(world := World(9, temperature=0.99))
    assert diagnose(world.rollouts(*columns), rounding="float32").findings[0].cause == "temperature"


@pytest.mark.parametrize(
    ("cause", "share", "size"), [("tensor_parallel", 0.005, 20.0), ("routing", 0.05, 0.5)]
)
def test_errors_of_some_tokens_are_named_where_the_others_round_far_less(cause, share, size):
    """As of two networks in float32, where --rounding says bfloat16."""
    world = World(5)
    engine, is_faulty = world.logp(world.logits), world.random.random(SEQUENCES * TIME) < share
    error = np.where(is_faulty, size, 1e-7) * -np.expm1(engine) * world.random.standard_normal(len(engine))
    finding = diagnose(world.rollouts(engine + error, engine)).findings[0]
    assert finding.cause == cause
    assert cause == "routing" or f"{is_faulty.sum()} of 600 tokens" in finding.evidence


def test_more_tokens_than_are_examined_are_sampled_with_a_note(monkeypatch):
    monkeypatch.setattr("kleash.diagnosis.doctor.MOST_TOKENS", 300)
    world = World(7, temperature=0.7)
    diagnosis = diagnose(world.rollouts(*temperature(world)))
    assert (diagnosis.tokens, diagnosis.sequences) == (600, 20)
    assert diagnosis.findings[0].cause == "temperature"
    assert "300 of 600 tokens were examined, a random sample in 20 of 20 responses" in diagnosis.notes


@pytest.mark.parametrize(("responses", "length", "most_tokens"), [(1000, 10, 5000), (5, 1000, 500)])
def test_a_sample_has_many_responses_or_parts_of_them(responses, length, most_tokens):
    columns = np.zeros((responses, length))
    prompts = [[number] for number in range(responses)]
    rollouts = rollouts_of(prompts, columns.astype(int).tolist(), columns, columns)
    rollouts[0].is_counted[0] = False
    sample = sample_rollouts(rollouts, most_tokens)
    assert most_tokens * 0.95 < sum(rollout.is_counted.sum() for rollout in sample) <= most_tokens
    numbers = [rollout.prompt_ids[0] for rollout in sample]
    assert numbers == sorted(set(numbers)) and len(numbers) == min(responses, 500)
    assert not any(rollout.is_counted[0] for rollout in sample if rollout.prompt_ids == (0,))
    if length == 1000:
        places = [np.flatnonzero(rollout.is_counted) for rollout in sample[1:]]
        assert all((place[:50] == np.arange(50)).all() and np.ptp(place[50:]) == 49 for place in places)
        assert len({int(place[50]) for place in places}) > 1
    assert sample_rollouts(rollouts, responses * length) is rollouts


@pytest.mark.parametrize(("of_trainer", "of_engine"), [(0, 0), (9, 2), (9, 4)])
def test_few_decimals_are_a_note_and_no_finding(of_trainer, of_engine):
    """Nor is it padding where rounding makes neighbours equal."""
    world = World(5)
    trainer, engine = world.logp(world.logits), world.noisy(0.01)
    trainer[30:33] = engine[30:33] = -3 + 0.44 * 10.0**-of_engine
    diagnosis = diagnose(world.rollouts(trainer.round(of_trainer), engine.round(of_engine)))
    assert diagnosis.findings == ()
    assert any("written with few decimals" in note for note in diagnosis.notes)


def test_a_token_of_which_a_hypothesis_says_nothing_changes_no_other_score():
    token = np.arange(6 * residuals.FITTED_TOKENS)
    ones, family = np.ones(len(token)), residuals.rounding(0.03)
    values = 0.01 * np.random.default_rng(0).standard_normal(len(token))
    without = np.where(token == 4, np.nan, values)  # in no sample of every third token of a fold
    sides = [residuals.Residuals(each, ones, 0 * ones) for each in (values, without)]
    scores = [residuals.held_out(side, family, token % 2, token) for side in sides]
    np.testing.assert_allclose(*(np.delete(each, 4) for each in scores), rtol=1e-12)


@pytest.mark.parametrize(
    ("rounding", "scale"), [("float32", 2e-7), ("float32", 2e-5), ("float16", 1e-3), ("bfloat16", 0.01)]
)
def test_rounding_is_healthy(rounding, scale):
    world = World(0)
    trainer, engine = world.logp(world.logits), world.noisy(scale)
    if rounding == "bfloat16":  # both are sure of the end token, whose value repeats like a placeholder
        for column, end in ((trainer, -0.003), (engine, 0.0)):
            column[world.position == TIME - 1] = end
    diagnosis = diagnose(world.rollouts(trainer, engine), rounding=rounding)
    assert diagnosis.findings == () and diagnosis.examined


def test_a_bias_within_rounding_is_no_finding(monkeypatch):
    monkeypatch.setattr(f"{__name__}.TIME", 200)
    engine = (world := World(0)).logp(world.logits)
    assert diagnose(world.rollouts(world.noisy(1e-5), engine + 0.003 * np.expm1(engine))).findings == ()


def test_single_tokens_after_prompts_of_one_length_have_no_errors_that_shrink_along_the_sequence():
    world = World(0)
    columns = [x[:, None] for x in (world.tokens, world.logp(world.logits), world.noisy(0.01))]
    assert diagnose(rollouts_of([[7, number] for number in range(len(columns[0]))], *columns)).findings == ()


@pytest.mark.parametrize("dtype", MACHINE_EPSILON)
def test_a_fault_begins_at_twice_the_largest_healthy_error(dtype):
    """It is one of the sizes of the mixture; were the next larger one the first, faults would begin at four times."""
    smallest = DISTINCT * healthy_scale(dtype)
    assert smallest in SCALE[most(smallest)[1].members]


def test_rounding_of_bfloat16_is_a_finding_in_float32():
    world = World(3)
    rollouts = world.rollouts(world.logp(world.logits), world.noisy(0.02))
    assert diagnose(rollouts, rounding="bfloat16").findings == ()
    finding = diagnose(rollouts, rounding="float32").findings[0]
    assert finding.cause == "weights" and "precision" in finding.alike


def test_few_tokens_are_not_diagnosed():
    world = World(5)
    rollouts = world.rollouts(*temperature(world))[:1]
    diagnosis = diagnose(rollouts)
    assert not diagnosis.examined and diagnosis.findings == () and "too few" in diagnosis.notes[0]


def written(path: Path, rollouts: list[RolloutRecord]) -> str:
    names = "prompt_token_ids", "response_token_ids", "trainer_logprobs", "engine_logprobs"
    columns = ((one.prompt_ids, one.response_ids, one.trainer, one.engine) for one in rollouts)
    rows = [dict(zip(names, map(np.ndarray.tolist, map(np.asarray, each)), strict=True)) for each in columns]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_the_command_prints_a_ranked_list(tmp_path, capsys):
    world = World(8, temperature=0.7)
    path = written(tmp_path / "rollouts.jsonl", world.rollouts(*temperature(world)))
    assert main(["doctor", path]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "temperature or processed probability: 98 %" in output
    assert "evidence: the engine is the sharper one, as at about" in output
    assert f"next: {CAUSES['temperature'].next_test}" in output
    assert "the data cannot tell these apart" in output
    healthy = World(9)
    clean = written(tmp_path / "clean.jsonl", healthy.rollouts(healthy.noisy(1e-3), healthy.noisy(1e-3)))
    assert main(["doctor", clean, "--limit", "18"]) == 0
    output = capsys.readouterr().out
    assert "no finding: rounding explains the differences" in output and "18 responses" in output


def test_the_command_reads_the_logs_of_several_ranks(tmp_path, capsys):
    """A fault in the log of one rank of two is said to be there, of columns that are log-probabilities."""
    healthy, faulty = World(9), World(8, temperature=0.7)
    paths = [
        written(tmp_path / "rank-0.jsonl", healthy.rollouts(healthy.noisy(1e-3), healthy.noisy(1e-3))),
        written(tmp_path / "rank-1.jsonl", faulty.rollouts(*temperature(faulty))),
    ]
    assert main(["doctor", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == dict.fromkeys(paths, SEQUENCES) and found["file"] == f"{paths[0]} and 1 more"
    assert f"per token of {paths[1]} is at least" in found["notes"][0]
    world = World(1)
    for columns in (raw_logits(world), raw_logits(world)[::-1]):
        logits = written(tmp_path / "logits.jsonl", world.rollouts(*columns))
        assert main(["doctor", logits, paths[0]]) == 0
        assert "per token of" not in capsys.readouterr().out, "logits have no KL by file"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "p"}, "give both models, --policy and --reference, or none"),
        ({"reference": "r"}, "give both models"),
        ({"revision_policy": "main"}, "--revision-policy needs --policy"),
        ({"rounding": "int8"}, "--rounding must be one of float32, float16, bfloat16; it is 'int8'"),
        ({"batch_tokens": 0}, "--batch-tokens must be at least 1; it is 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(OptionError) as error:
        DoctorJob(rollouts=("x",), **options)
    assert message in str(error.value)


def test_logits_are_read_by_the_doctor_alone_and_numbers_that_are_none_by_nobody(tmp_path):
    world = World(1)
    trainer, engine = raw_logits(world)
    path = written(tmp_path / "rollouts.jsonl", world.rollouts(trainer, engine))
    assert len(read_rollouts(path, allow_logits=True)) == SEQUENCES
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    found = [diagnose(x) for x in (path, records, pa.Table.from_pylist(records))]
    assert found[0].findings and found[0].findings == found[1].findings == found[2].findings
    for nothing in ([], None, [1.0], {"a": 1}, [{"a": 1}]):
        with pytest.raises(SourceError, match=r"the rollouts given|rollouts are|rollouts, entry 1"):
            diagnose(nothing)
    with pytest.raises(SourceError, match="kleash doctor says more"):
        read_rollouts(path)
    engine[7] = 1e200
    path = written(tmp_path / "rollouts.jsonl", world.rollouts(engine, engine))
    with pytest.raises(SourceError, match=r"'trainer_logprobs' is 1e\+200 at token 7; neither a log-prob"):
        read_rollouts(path, allow_logits=True)
