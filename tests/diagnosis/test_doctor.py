"""The doctor on synthetic distributions, whose every fault is known, and on planted faults of the shipped pair."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from kleash.cli import main
from kleash.diagnosis import RolloutRecord, diagnose, read_rollouts
from kleash.diagnosis.causes import CAUSES
from kleash.errors import OptionError, SourceError
from kleash.jobs.reading_jobs import DoctorJob
from kleash.records import Diagnosis

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

    def rollouts(self, trainer: Array, engine: Array, reference: Array | None = None) -> list[RolloutRecord]:
        return [
            RolloutRecord(
                prompt_ids=(number,),
                response_ids=tuple(self.tokens[part].tolist()),
                trainer=trainer[part],
                engine=engine[part],
                reference=None if reference is None else reference[part],
                is_counted=np.ones(TIME, dtype=bool),
                location=f"response {number}",
            )
            for number in range(SEQUENCES)
            for part in [slice(number * TIME, (number + 1) * TIME)]
        ]


def temperature(world: World) -> tuple[Array, Array]:
    return world.logp(world.logits), world.logp(world.logits / 0.7)


def raw_logits(world: World) -> tuple[Array, Array]:
    return world.logp(world.logits), np.take_along_axis(world.logits, world.tokens[:, None], axis=1)[:, 0]


def top_p(world: World) -> tuple[Array, Array]:
    """The engine draws from the likeliest tokens that hold 90 %."""
    p = np.exp(log_softmax(world.logits, axis=-1))
    order = np.argsort(-p, axis=-1)
    before = np.take_along_axis(p, order, -1).cumsum(-1) - np.take_along_axis(p, order, -1)
    is_in = np.zeros_like(p, dtype=bool)
    np.put_along_axis(is_in, order, before < 0.9, -1)
    cut = np.where(is_in, world.logits, -np.inf)
    world.tokens = world.draw(cut)
    return world.logp(world.logits), world.logp(cut)


def shift(world: World) -> tuple[Array, Array]:
    column = world.logp(world.logits)
    return np.roll(column.reshape(SEQUENCES, TIME), 1, axis=1).ravel(), column


def padding(world: World) -> tuple[Array, Array]:
    trainer, is_padding = world.logp(world.logits), (world.position >= 22)
    return trainer, np.where(is_padding, 0.0, trainer)


def another_prompt(world: World) -> tuple[Array, Array]:
    return world.logp(world.logits), world.noisy((1.5 / (1 + world.position / 3))[:, None])


def other_weights(world: World) -> tuple[Array, Array]:
    """Every logit moves, by amounts that differ from position to position."""
    size = np.exp(world.random.standard_normal((len(world.logits), 1)))
    return world.logp(world.logits), world.noisy(0.3 * size)


def bfloat16_values(world: World) -> tuple[Array, Array]:
    column = world.logp(world.logits).astype(np.float32)
    rounded_bits = (column.view(np.uint32) + 0x8000) & 0xFFFF0000
    return column.astype(np.float64), rounded_bits.astype(np.uint32).view(np.float32).astype(np.float64)


def other_experts(world: World) -> tuple[Array, Array]:
    is_moved = world.random.random((len(world.logits), 1)) < 0.2
    return world.logp(world.logits), world.noisy(0.005 + 0.4 * is_moved)


def missing_shard(world: World) -> tuple[Array, Array]:
    is_broken = world.random.random((len(world.logits), 1)) < 0.008
    return world.logp(world.logits), world.noisy(0.005 + 5 * is_broken)


FAULTS: dict[str, tuple[str, Callable[[World], tuple[Array, Array]]]] = {
    "temperature": ("temperature", temperature),
    "raw logits": ("processed", raw_logits),
    "top-p": ("truncation", top_p),
    "a shifted column": ("shift", shift),
    "padding that counts": ("mask", padding),
    "another prompt": ("context", another_prompt),
    "other weights": ("weights", other_weights),
    "log-probabilities in bfloat16": ("precision", bfloat16_values),
    "other experts": ("routing", other_experts),
    "a missing shard": ("tensor_parallel", missing_shard),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_first_without_models(fault: str) -> None:
    cause, plant = FAULTS[fault]
    world = World(2, temperature=0.7 if fault == "temperature" else 1.0)
    findings = diagnose(world.rollouts(*plant(world))).findings
    assert findings and findings[0].cause == cause, findings
    assert findings[0].probability > 0.6 and findings[0].next_test == CAUSES[cause].next_test
    if fault == "temperature":
        assert findings[0].alike == ("processed",), "the columns alone cannot tell these apart"
    if fault == "raw logits":
        assert findings[0].alike == ("column",), "values above 0 can"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_in_the_trainers_column_too(fault: str) -> None:
    cause, plant = FAULTS[fault]
    if fault in ("top-p", "raw logits"):
        return  # the trainer draws no tokens
    world = World(7, temperature=0.7 if fault == "temperature" else 1.0)
    trainer, engine = plant(world)
    findings = diagnose(world.rollouts(engine, trainer)).findings
    assert findings and findings[0].cause == cause, findings


OTHER_COLUMNS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "base 2": ("logarithms to base 2", lambda logp: logp / np.log(2)),
    "base 10": ("logarithms to base 10", lambda logp: logp / np.log(10)),
    "probabilities": ("probabilities, not their logarithms", np.exp),
    "negative": ("negative log-likelihoods", np.negative),
    "zeros": ("are all 0: the column was not filled in, or that side is greedy", np.zeros_like),
    "sums of responses": (
        "do not depend on each other",
        lambda logp: logp.reshape(SEQUENCES, TIME).sum(1).repeat(TIME),
    ),
    "means of responses": (
        "do not depend on each other",
        lambda logp: logp.reshape(SEQUENCES, TIME).mean(1).repeat(TIME),
    ),
    "entropies": (
        "they are logits",
        lambda logp: 2 - 0.2 * logp + np.sin(np.arange(len(logp))),
    ),
    "other responses": ("do not depend on each other", lambda logp: np.roll(logp, TIME)),
    "reversed": ("do not depend on each other", lambda logp: logp[::-1]),
}


@pytest.mark.parametrize("kind", OTHER_COLUMNS)
def test_a_column_that_is_not_of_log_probabilities_is_named_by_what_it_holds(kind: str) -> None:
    """Temperature or truncation would be likelier than any other cause of an unknown column."""
    evidence, change = OTHER_COLUMNS[kind]
    world = World(3)
    trainer, engine = world.logp(world.logits), world.noisy(0.005)
    for columns in ((trainer, change(engine)), (change(engine), trainer)):
        finding = diagnose(world.rollouts(*columns)).findings[0]
        assert finding.cause == "column" and evidence in finding.evidence


def in_bfloat16(column: Array) -> Array:
    return torch.from_numpy(column).bfloat16().double().numpy()


HEALTHY_NOISE: dict[str, Callable[[World, Array], Array]] = {
    "heavy tails": lambda world, size: 0.005 * size * world.random.standard_t(2, len(size)),
    "two kernels": lambda world, size: (
        size
        * np.where(world.random.random(len(size)) < 0.3, 0.03, 0.003)
        * world.random.standard_normal(len(size))
    ),
    "half of the tokens equal": lambda world, size: (
        0.01 * size * world.random.standard_normal(len(size)) * (world.random.random(len(size)) < 0.5)
    ),
    "shrinking": lambda world, size: (
        0.03 * size * world.random.standard_normal(len(size)) / (1 + world.position / 3)
    ),
}


@pytest.mark.parametrize("kind", HEALTHY_NOISE)
def test_rounding_that_varies_among_tokens_is_healthy(kind: str) -> None:
    """Errors of logits below those that bfloat16 explains, in any mixture: not some tokens' experts or prompts."""
    world = World(0)
    trainer = world.logp(world.logits)
    engine = np.minimum(trainer + HEALTHY_NOISE[kind](world, 1 - np.exp(trainer)), 0)
    assert diagnose(world.rollouts(trainer, engine)).findings == ()


def test_columns_of_bfloat16_numbers_on_both_sides_are_a_note_and_no_finding() -> None:
    """Rounding of unlikely tokens is far above that of logits, and was taken for routing."""
    world = World(0)
    columns = in_bfloat16(world.logp(world.logits)), in_bfloat16(world.noisy(0.01))
    diagnosis = diagnose(world.rollouts(*columns))
    assert diagnosis.findings == () and any("16-bit numbers" in note for note in diagnosis.notes)


@pytest.mark.parametrize("fault", ["temperature", "top-p", "a shifted column", "padding that counts"])
def test_a_column_of_bfloat16_numbers_hides_no_other_fault(fault: str) -> None:
    cause, plant = FAULTS[fault]
    world = World(5)
    trainer, engine = plant(world)
    both = diagnose(world.rollouts(in_bfloat16(trainer), in_bfloat16(engine))).findings
    assert both[0].cause == cause and all(finding.cause != "precision" for finding in both)
    first, *_, last = diagnose(world.rollouts(trainer, in_bfloat16(engine))).findings
    assert first.cause == cause and last.cause == "precision" and "bfloat16 numbers" in last.evidence


@pytest.mark.parametrize(
    ("cause", "plant"), [("shift", shift), ("weights", other_weights), ("temperature", temperature)]
)
def test_a_fault_of_some_responses_is_named_with_their_number(
    cause: str, plant: Callable[[World], tuple[Array, Array]]
) -> None:
    world = World(7)
    trainer, faulty = plant(world)
    is_faulty = np.repeat(np.arange(SEQUENCES) < 6, TIME)
    engine = np.where(is_faulty, faulty, trainer)
    finding = diagnose(world.rollouts(trainer, engine)).findings[0]
    assert finding.cause == cause and f"in 6 of {SEQUENCES} responses" in finding.evidence


def test_tokens_of_probability_0_are_few_tokens_far_out_and_a_note() -> None:
    world = World(8)
    engine = world.logp(world.logits)
    trainer = world.noisy(0.005)
    trainer[[17, 400]] = -np.inf
    diagnosis = diagnose(world.rollouts(trainer, engine))
    assert diagnosis.findings[0].cause == "tensor_parallel"
    assert "the trainer gives a probability of 0 to 2 tokens that the engine drew" in diagnosis.notes


@pytest.mark.parametrize("inverse", [1.01, 3.3])
def test_a_temperature_near_1_or_far_below_is_named_without_models(inverse: float) -> None:
    world = World(9, temperature=1 / inverse)
    columns = world.logp(world.logits), world.logp(world.logits * inverse)
    assert diagnose(world.rollouts(*columns), rounding="float32").findings[0].cause == "temperature"


@pytest.mark.parametrize("size", [0.02])
def test_noise_of_one_size_on_all_log_probabilities_is_not_routing(size: float) -> None:
    """Errors of logits leave a token unchanged that is nearly certain, so these were a share of tokens far out."""
    world = World(3)
    trainer = world.logp(world.logits)
    noise = size * world.random.standard_normal(len(trainer))
    finding = diagnose(world.rollouts(trainer, np.minimum(trainer + noise, 0))).findings[0]
    assert finding.cause == "weights" and "precision" in finding.alike


def test_errors_on_all_tokens_may_be_of_weights_or_precision() -> None:
    """As of weights in 8 bits. They do not shrink along the response, and no share of the tokens is far out."""
    world = World(3)
    finding = diagnose(world.rollouts(world.logp(world.logits), world.noisy(0.06))).findings[0]
    assert finding.cause == "weights" and "precision" in finding.alike


def test_a_low_temperature_is_named_without_models() -> None:
    """Where a token that is nearly certain still has some of the entropy of the other side."""
    world = World(2, temperature=0.5)
    findings = diagnose(world.rollouts(world.logp(world.logits), world.logp(world.logits / 0.5))).findings
    assert findings[0].cause == "temperature", findings


def test_a_shift_of_several_tokens_is_named() -> None:
    world = World(2)
    column = world.logp(world.logits)
    moved = np.roll(column.reshape(SEQUENCES, TIME), -3, axis=1).ravel()
    finding = diagnose(world.rollouts(column, moved)).findings[0]
    assert finding.cause == "shift" and "the next token but 2" in finding.evidence


@pytest.mark.parametrize("settings", ["min-p", "top-k"])
def test_a_cut_is_told_from_a_temperature_without_models(settings: str) -> None:
    """The cut side is never the smaller one; in bfloat16, where rounding hides small differences, too."""
    world = World(4)
    p = np.exp(log_softmax(world.logits, axis=-1))
    kept = p >= 0.3 * p.max(-1, keepdims=True) if settings == "min-p" else p >= np.sort(p)[:, -4][:, None]
    world.tokens = world.draw(np.where(kept, world.logits, -np.inf))
    noisy = world.logits + 0.01 * world.random.standard_normal(world.logits.shape)
    cut = world.logp(np.where(kept, noisy, -np.inf))
    findings = diagnose(world.rollouts(world.logp(world.logits), cut)).findings
    assert findings[0].cause == "truncation" and findings[0].probability > 0.5, findings


@pytest.mark.parametrize("decimals", [2, 3, 4])
def test_few_decimals_are_a_note_and_no_finding(decimals: int) -> None:
    world = World(4)
    column = world.logp(world.logits)
    diagnosis = diagnose(world.rollouts(column, column.round(decimals)), rounding="float32")
    assert diagnosis.findings == ()
    assert any("written with few decimals" in note for note in diagnosis.notes)


def test_equal_neighbours_are_no_padding_where_columns_are_of_whole_numbers() -> None:
    world = World(5)
    trainer, engine = world.logp(world.logits).round(), world.noisy(0.01).round()
    assert diagnose(world.rollouts(trainer, engine)).findings == ()


@pytest.mark.parametrize(("rounding", "scale"), [("float32", 2e-7), ("float16", 1e-3), ("bfloat16", 0.01)])
@pytest.mark.parametrize("seed", range(2))
def test_rounding_is_healthy(rounding: str, scale: float, seed: int) -> None:
    world = World(seed)
    diagnosis = diagnose(world.rollouts(world.logp(world.logits), world.noisy(scale)), rounding=rounding)
    assert diagnosis.findings == () and diagnosis.examined


def test_rounding_of_bfloat16_is_a_finding_in_float32() -> None:
    world = World(3)
    rollouts = world.rollouts(world.logp(world.logits), world.noisy(0.02))
    assert diagnose(rollouts, rounding="bfloat16").findings == ()
    finding = diagnose(rollouts, rounding="float32").findings[0]
    assert finding.cause == "weights" and "precision" in finding.alike


@pytest.mark.parametrize("value", [-1.0, -2.0, -3.0])
def test_placeholders_of_ordinary_size_are_named_by_their_repetition(value: float) -> None:
    """Their differences are as large as those of another model, so only that they repeat gives them away."""
    world = World(2)
    trainer, engine = world.logp(world.logits), world.noisy(0.02)
    findings = diagnose(world.rollouts(trainer, np.where(world.position >= 15, value, engine))).findings
    assert findings[0].cause == "mask" and findings[0].probability > 0.9, findings


def test_few_tokens_are_not_diagnosed() -> None:
    world = World(5)
    rollouts = world.rollouts(*temperature(world))[:1]
    diagnosis = diagnose(rollouts)
    assert not diagnosis.examined and diagnosis.findings == () and "too few" in diagnosis.notes[0]


def test_impossible_values_are_survived() -> None:
    world = World(6)
    trainer, engine = world.logp(world.logits), world.noisy(0.005)
    trainer[::50] = engine[7] = -np.inf
    findings = diagnose(world.rollouts(trainer, engine)).findings
    assert findings[0].cause in ("tensor_parallel", "routing")
    same = np.zeros(SEQUENCES * TIME)
    assert diagnose(world.rollouts(same, same)).findings == (), (
        "a greedy engine that is certain of every token"
    )


def written(path: Path, rollouts: list[RolloutRecord], **changes: Any) -> str:
    rows = [
        {
            "prompt_token_ids": list(rollout.prompt_ids),
            "response_token_ids": list(rollout.response_ids),
            "trainer_logprobs": rollout.trainer.tolist(),
            "engine_logprobs": rollout.engine.tolist(),
        }
        for rollout in rollouts
    ]
    path.write_text("\n".join(json.dumps(row | changes) for row in rows))
    return str(path)


def test_the_command_prints_a_ranked_list(tmp_path: Path, capsys: Any) -> None:
    world = World(8, temperature=0.7)
    path = written(tmp_path / "rollouts.jsonl", world.rollouts(*temperature(world)))
    assert main(["doctor", path]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "temperature or processed probability: 98%" in output
    assert "evidence: the engine is the sharper one, as at about" in output
    assert f"next: {CAUSES['temperature'].next_test}" in output
    assert "cannot tell these apart" in output
    assert main(["doctor", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["findings"][0]) >= {"cause", "probability", "evidence", "next_test"}
    healthy = World(9)
    clean = written(tmp_path / "clean.jsonl", healthy.rollouts(healthy.noisy(1e-3), healthy.noisy(1e-3)))
    assert main(["doctor", clean, "--limit", "18"]) == 0
    output = capsys.readouterr().out
    assert "no finding: rounding explains the differences" in output and "18 responses" in output


def test_the_command_reads_the_logs_of_several_ranks(tmp_path: Path, capsys: Any) -> None:
    """A fault in the log of one rank of three is said to be there, and that log alone has the right cause."""
    worlds = [World(seed) for seed in (9, 10)]
    paths = [
        written(tmp_path / f"rank-{rank}.jsonl", world.rollouts(world.noisy(1e-3), world.noisy(1e-3)))
        for rank, world in enumerate(worlds)
    ]
    faulty = World(8, temperature=0.7)
    paths.append(written(tmp_path / "rank-2.jsonl", faulty.rollouts(*temperature(faulty))))
    assert main(["doctor", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == dict.fromkeys(paths, SEQUENCES) and found["file"] == f"{paths[0]} and 2 more"
    assert f"per token of {paths[2]} is at least" in found["notes"][0]
    assert main(["doctor", paths[2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["cause"] == "temperature"
    assert main(["doctor", *paths[:2]]) == 0
    output = capsys.readouterr().out
    assert "no finding" in output and "per token of" not in output and ", from 2 files" in output
    world = World(1)
    logits = written(tmp_path / "logits.jsonl", world.rollouts(*raw_logits(world)))
    assert main(["doctor", logits, paths[0]]) == 0, "logits have no KL by file"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "p"}, "give both models, --policy and --reference, or none"),
        ({"reference": "r"}, "give both models"),
        ({"revision_policy": "main"}, "--revision-policy needs --policy"),
        ({"rounding": "int8"}, "--rounding must be one of float32, float16, bfloat16; it is 'int8'"),
        ({"dtype": "int8"}, "--dtype must be one of"),
        ({"limit": 0}, "--limit must be at least 1; it is 0"),
        ({"batch_tokens": 0}, "--batch-tokens must be at least 1; it is 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        DoctorJob(rollouts=("x",), **options)
    assert message in str(error.value)


def test_logits_are_read_by_the_doctor_alone(tmp_path: Path) -> None:
    world = World(1)
    path = written(tmp_path / "rollouts.jsonl", world.rollouts(*raw_logits(world)))
    assert len(read_rollouts(path, allow_logits=True)) == SEQUENCES
    with pytest.raises(SourceError, match="kleash doctor says more"):
        read_rollouts(path)


@pytest.mark.filterwarnings("error")
def test_values_beyond_float64_are_refused_or_stand_for_a_probability_of_0(tmp_path: Path) -> None:
    world = World(6)
    trainer, engine = world.logp(world.logits), world.noisy(0.005)
    trainer[::50] = -1e300
    assert diagnose(world.rollouts(trainer, engine)).findings[0].cause in ("tensor_parallel", "routing")
    assert diagnose(world.rollouts(np.full_like(trainer, -np.inf), engine)).findings
    engine[7] = 1e200
    path = written(tmp_path / "rollouts.jsonl", world.rollouts(engine, engine))
    with pytest.raises(SourceError, match=r"'trainer_logprobs' is 1e\+200 at token 7; neither a log-prob"):
        read_rollouts(path, allow_logits=True)


def test_a_diagnosis_is_plain_json() -> None:
    world = World(2)
    diagnosis = diagnose(world.rollouts(*shift(world)), file="\x1b[31m")
    assert isinstance(diagnosis, Diagnosis)
    assert json.loads(diagnosis.to_json())["findings"][0]["cause"] == "shift"
    assert replace(diagnosis, file="x").file == "x"
