"""How often kleash doctor names a planted cause first: python benchmarks/doctor.py

Each cause is planted on real outputs of the shipped pair: the policy draws responses as the engine would, and both
columns are scored, one with the fault; the doctor gets the rollouts with and without the models. Clean
runs have an engine that differs by rounding alone. In runs of even seeds the engine's network is in float32, in those
of odd seeds in bfloat16; the doctor is told so. docs/doctor.md has the tables.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import write_result
from torch import Tensor

from kleash.diagnosis import RolloutRecord, diagnose
from kleash.diagnosis.causes import CAUSES
from kleash.diagnosis.model_scores import ModelScores, log_kept_mass
from kleash.diagnosis.token_table import tabulate
from kleash.models import Pair, Prompt, Sampling, TokenSequence, generate, load_pair, read_prompts

PROMPTS, NEW_TOKENS = 32, 40
CLEAN = "clean"
Array = np.ndarray


class Columns(NamedTuple):
    """The columns of a run, over all response tokens."""

    sequences: Sequence[TokenSequence]
    trainer: Array
    engine: Array
    reference: Array | None = None


@cache
def pair_in(dtype: str) -> Pair:
    """The shipped pair in a dtype."""
    return load_pair("shipped:policy", "shipped:reference", dtype=dtype)


def rollouts_of(columns: Columns) -> list[RolloutRecord]:
    """The rollouts of a run; every token counts."""
    ends = np.cumsum([len(sequence.response_ids) for sequence in columns.sequences])
    return [
        RolloutRecord(
            prompt_ids=sequence.prompt_ids,
            response_ids=sequence.response_ids,
            trainer=columns.trainer[end - len(sequence.response_ids) : end],
            engine=columns.engine[end - len(sequence.response_ids) : end],
            reference=(
                None
                if columns.reference is None
                else columns.reference[end - len(sequence.response_ids) : end]
            ),
            is_counted=np.ones(len(sequence.response_ids), dtype=bool),
            location=f"response {number}",
        )
        for number, (sequence, end) in enumerate(zip(columns.sequences, ends.tolist(), strict=True))
    ]


def scores_of(pair: Pair, sequences: Sequence[TokenSequence], batch_tokens: int = 4096) -> ModelScores:
    """The scores of a pair on sequences."""
    zeros = np.zeros(sum(len(sequence.response_ids) for sequence in sequences))
    rollouts = rollouts_of(Columns(sequences, zeros, zeros))
    return ModelScores.of(pair, rollouts, tabulate(rollouts), batch_tokens)


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """The random choices of one simulated run."""

    seed: int
    prompts: int = PROMPTS
    new_tokens: int = NEW_TOKENS

    @property
    def random(self) -> np.random.Generator:
        return np.random.default_rng([22, self.seed])

    @property
    def variant(self) -> int:
        """Counts through the variants of a fault, two seeds for each: one with each dtype."""
        return self.seed // 2

    @property
    def rounding(self) -> str:
        return "bfloat16" if self.seed % 2 else "float32"

    @property
    def engine_pair(self) -> Pair:
        return pair_in(self.rounding)

    @property
    def questions(self) -> list[Prompt]:
        all_prompts = read_prompts("shipped:prompts", pair_in("float32"), limit=None)
        chosen = self.random.choice(len(all_prompts), self.prompts, replace=False)
        return [all_prompts[index] for index in chosen]

    def draw(self, pair: Pair | None = None, **sampling: Any) -> list[TokenSequence]:
        """Responses drawn by the policy."""
        options = Sampling(max_new_tokens=self.new_tokens, seed=self.seed, **sampling)
        return generate((pair or pair_in("float32")).policy, self.questions, options)

    def healthy(self) -> tuple[list[TokenSequence], ModelScores, ModelScores]:
        """Responses of the policy with the trainer's and the engine's scores, which differ by rounding."""
        sequences = self.draw()
        return (
            sequences,
            scores_of(pair_in("float32"), sequences),
            scores_of(self.engine_pair, sequences, 512),
        )


def clean(run: Run) -> Columns:
    sequences, trainer, engine = run.healthy()
    return Columns(sequences, trainer.policy, engine.policy, engine.reference)


def temperature(run: Run) -> Columns:
    """The engine draws at a temperature and says so; the trainer does not divide, or divides when it should not."""
    drawn_at = (0.6, 0.7, 0.8, 1.2, 1.4)[run.variant % 5]
    sequences = run.draw(temperature=drawn_at)
    trainer, engine = scores_of(pair_in("float32"), sequences), scores_of(run.engine_pair, sequences)
    return Columns(sequences, trainer.policy, engine.at_temperature(drawn_at), trainer.reference)


def processed(run: Run) -> Columns:
    """The engine draws at a temperature and returns raw log-probabilities, or logits; the trainer divides."""
    drawn_at = (0.6, 0.7, 0.8, 1.2, 1.4)[run.variant % 5]
    sequences = run.draw(temperature=drawn_at)
    trainer, engine = scores_of(pair_in("float32"), sequences), scores_of(run.engine_pair, sequences)
    raw = engine.token_logp(lambda logits: logits) if run.variant % 5 == 2 else engine.policy
    return Columns(sequences, trainer.at_temperature(drawn_at), raw, trainer.reference)


def truncation(run: Run) -> Columns:
    """The engine cuts and renormalises; the trainer does not."""
    settings: dict[str, Any] = (
        {"top_p": 0.9},
        {"top_k": 20},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"top_p": 0.8},
    )[run.variant % 5]
    sequences = run.draw(**settings)
    trainer, engine = scores_of(pair_in("float32"), sequences), scores_of(run.engine_pair, sequences)
    return Columns(
        sequences, trainer.policy, engine.policy - log_kept_mass(engine, settings), trainer.reference
    )


def shift(run: Run) -> Columns:
    """The trainer's column is a token late or early."""
    sequences, trainer, engine = run.healthy()
    offset = 1 if run.variant % 2 else -1
    parts = np.split(trainer.policy, np.cumsum([len(sequence.response_ids) for sequence in sequences])[:-1])
    return Columns(
        sequences, np.concatenate([np.roll(part, offset) for part in parts]), engine.policy, trainer.reference
    )


def column(run: Run) -> Columns:
    """The engine's column has another base, probabilities, the other sign, other responses, or nothing but zeros."""
    sequences, trainer, engine = run.healthy()
    changes: Sequence[Callable[[Array], Array]] = (
        lambda values: values / np.log(2),
        np.exp,
        np.negative,
        lambda values: np.roll(values, PROMPTS),
        np.zeros_like,
    )
    return Columns(sequences, trainer.policy, changes[run.variant % 5](engine.policy), trainer.reference)


def mask(run: Run) -> Columns:
    """Padding after the responses, or the results of tools within them, count; the engine has 0 there."""
    random, sequences = run.random, run.draw()
    extended, is_placeholder = [], []
    for number, sequence in enumerate(sequences):
        ids, count = list(sequence.response_ids), int(random.integers(5, 15))
        if run.variant % 2:
            place, inserted = len(ids), [pair_in("float32").tokenizer.pad_token_id] * count
        else:
            place = int(random.integers(0, len(ids)))
            inserted = list(sequences[(number + 1) % len(sequences)].response_ids[:count])
        inserted = inserted if number % 2 else []
        extended.append(replace(sequence, response_ids=(*ids[:place], *inserted, *ids[place:])))
        is_placeholder += [False] * place + [True] * len(inserted) + [False] * (len(ids) - place)
    trainer, engine = scores_of(pair_in("float32"), extended), scores_of(run.engine_pair, extended)
    values = np.where(is_placeholder, 0.0, engine.policy)
    return Columns(extended, trainer.policy, values, trainer.reference)


def context(run: Run) -> Columns:
    """The engine reads another prompt than the trainer: special tokens, or a template before or after it."""
    tokenizer = pair_in("float32").tokenizer
    before, cut, after = (
        ((tokenizer.bos_token_id,), 0, ()),
        ((), 1, ()),
        ((), 0, tuple(tokenizer.encode("\n", add_special_tokens=False))),
        (tuple(tokenizer.encode("A letter to Emma: ", add_special_tokens=False)), 0, ()),
        ((), 0, tuple(tokenizer.encode(' "', add_special_tokens=False))),
    )[run.variant % 5]
    questions = run.questions
    changed = [
        replace(question, token_ids=(*before, *question.token_ids[: len(question.token_ids) - cut], *after))
        for question in questions
    ]
    options = Sampling(max_new_tokens=run.new_tokens, seed=run.seed)
    drawn = generate(pair_in("float32").policy, changed, options)
    engine = scores_of(run.engine_pair, drawn)
    sequences = [
        replace(sequence, prompt_ids=question.token_ids)
        for sequence, question in zip(drawn, questions, strict=True)
    ]
    trainer = scores_of(pair_in("float32"), sequences)
    return Columns(sequences, trainer.policy, engine.policy, trainer.reference)


@contextmanager
def changed_weights(pair: Pair, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Context in which the policy's network has other weights."""
    parameters = dict(pair.policy.network.named_parameters())
    saved = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(change(name, parameter.detach()))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])


def weight_change(run: Run, pair: Pair) -> Callable[[str, Tensor], Tensor]:
    """Stale weights: part of the way back to the reference, or all; or another adapter of low rank."""
    reference = dict(pair.reference.network.named_parameters())
    part = (0.5, 1.0, 0.3, None, None)[run.variant % 5]
    generator = torch.Generator().manual_seed(run.seed)

    def change(name: str, weight: Tensor) -> Tensor:
        if part is not None:
            return weight.lerp(reference[name].detach().to(weight.dtype), part)
        if weight.dim() != 2 or "embed" in name:
            return weight
        left = torch.randn(weight.shape[0], 4, generator=generator)
        right = torch.randn(4, weight.shape[1], generator=generator)
        update = (left @ right) * (0.08 * weight.float().norm() / (left @ right).norm())
        return weight + update.to(weight.dtype)

    return change


def weights(run: Run) -> Columns:
    """The engine has stale weights or another adapter, and draws with them."""
    with changed_weights(run.engine_pair, weight_change(run, run.engine_pair)):
        sequences = run.draw(run.engine_pair)
        engine = scores_of(run.engine_pair, sequences).policy
    trainer = scores_of(pair_in("float32"), sequences)
    return Columns(sequences, trainer.policy, engine, trainer.reference)


def reference(run: Run) -> Columns:
    """The reference's column is the policy's (adapters not disabled), or of other weights."""
    sequences, trainer, engine = run.healthy()
    if run.variant % 2 == 0:
        return Columns(sequences, trainer.policy, engine.policy, engine.policy)
    pair = pair_in("float32")
    with changed_weights(pair, weight_change(replace(run, seed=6 + run.seed % 2), pair)):
        other = scores_of(pair, sequences).policy
    return Columns(sequences, trainer.policy, engine.policy, other)


def precision(run: Run) -> Columns:
    """The engine rounds logits to bfloat16, and in runs of odd seeds the log-probabilities as well."""
    sequences, trainer, engine = run.healthy()
    values = engine.token_logp(lambda logits: logits.bfloat16().float().log_softmax(-1))
    if run.seed % 2:
        values = torch.from_numpy(values).bfloat16().double().numpy()
    return Columns(sequences, trainer.policy, values, trainer.reference)


def routing(run: Run) -> Columns:
    """Some tokens' hidden states are moved by 2 to 20 %, as by another expert."""
    sequences, trainer, engine = run.healthy()
    random = run.random
    hidden = engine.hidden.float()
    size = hidden.norm(dim=-1, keepdim=True) / hidden.shape[1] ** 0.5
    is_moved = torch.from_numpy(random.random(len(hidden)) < random.uniform(0.1, 0.4)).unsqueeze(-1)
    amount = torch.from_numpy(np.exp(random.uniform(np.log(0.02), np.log(0.2), (len(hidden), 1)))).float()
    noise = torch.from_numpy(random.standard_normal(hidden.shape)).float() * size * amount
    values = engine.token_logp(hidden=torch.where(is_moved, hidden + noise, hidden))
    return Columns(sequences, trainer.policy, values, trainer.reference)


def tensor_parallel(run: Run) -> Columns:
    """For 0.3 to 1 % of the tokens, half of the last layer's sum is missing."""
    sequences, trainer, engine = run.healthy()
    random = run.random
    broken = engine.hidden.clone()
    broken[:, : broken.shape[1] // 2] = 0
    is_broken = torch.zeros(len(broken), 1, dtype=torch.bool)
    count = max(4, round(len(broken) * random.uniform(0.003, 0.01)))
    is_broken[torch.from_numpy(random.choice(len(broken), count, replace=False))] = True
    values = engine.token_logp(hidden=torch.where(is_broken, broken, engine.hidden))
    return Columns(sequences, trainer.policy, values, trainer.reference)


PLANTS: Mapping[str, Callable[[Run], Columns]] = {
    "temperature": temperature,
    "processed": processed,
    "truncation": truncation,
    "shift": shift,
    "column": column,
    "mask": mask,
    "context": context,
    "weights": weights,
    "reference": reference,
    "precision": precision,
    "routing": routing,
    "tensor_parallel": tensor_parallel,
}
UNSEEN_WITHOUT_MODELS = {"reference": lambda run: run.variant % 2 == 1}
"""Faults that no log-probability shows: a reference of other weights."""


def first_cause(columns: Columns, run: Run, pair: Pair | None) -> tuple[str, ...]:
    """The first cause that the doctor names, with those alike; "clean" if there is no finding."""
    findings = diagnose(rollouts_of(columns), pair=pair, rounding=run.rounding).findings
    return (findings[0].cause, *findings[0].alike) if findings else (CLEAN,)


def trial(cause: str, run: Run) -> dict[str, Any]:
    """What the doctor names with and without the models, for one run."""
    columns = clean(run) if cause == CLEAN else PLANTS[cause](run)
    is_unseen = UNSEEN_WITHOUT_MODELS.get(cause, lambda _: False)(run)
    return {
        "cause": cause,
        "seed": run.seed,
        "with_models": first_cause(columns, run, pair_in("float32")),
        "without_models": None if is_unseen else first_cause(columns, run, None),
    }


def table(trials: Sequence[Mapping[str, Any]]) -> str:
    """A row for each cause: how many runs, how many named first, and what was named in its place."""
    lines = ["| planted | named first, with the models | without them |", "|---|---|---|"]
    for cause in dict.fromkeys(row["cause"] for row in trials):
        cells = [_cell(cause, [row[mode] for row in trials if row["cause"] == cause]) for mode in MODES]
        lines.append(f"| {cause} | {' | '.join(cells)} |")
    return "\n".join(lines)


MODES = ("with_models", "without_models")


def _cell(cause: str, named: Sequence[Sequence[str] | None]) -> str:
    seen = [names for names in named if names is not None]
    hits = sum(cause in names for names in seen)
    wrong_names: dict[str, int] = {}
    for names in seen:
        if cause not in names:
            wrong_names[names[0]] = wrong_names.get(names[0], 0) + 1
    wrong = ", ".join(f"{name} {count}" for name, count in wrong_names.items())
    return f"{hits} of {len(seen)}" + (f" ({wrong})" if wrong else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Planted causes and clean runs, with and without the models."
    )
    parser.add_argument("--seeds", type=int, default=20, help="runs of each cause")
    parser.add_argument("--clean", type=int, default=200, help="clean runs")
    parser.add_argument("--only", nargs="*", default=[*CAUSES], help="causes to plant")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    trials: list[dict[str, Any]] = []
    jobs = [(cause, options.seeds) for cause in options.only] + [(CLEAN, options.clean)]
    for cause, count in jobs:
        seeds = range(options.first_seed, options.first_seed + count)
        rows = [trial(cause, Run(seed=seed)) for seed in seeds]
        trials += rows
        for row in rows:
            if cause != CLEAN and any(row[mode] is not None and cause not in row[mode] for mode in MODES):
                print(f"  {row}")
        print(
            table(rows).splitlines()[-1] if rows else f"no {cause}",
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )
    figures = {
        "what": "the first cause named for planted faults and clean runs of the shipped pair",
        "tokens_per_run": PROMPTS * NEW_TOKENS,
        "seconds": round(time.perf_counter() - start, 1),
        "trials": trials,
    }
    print(table(trials))
    print(f"\n{write_result('doctor', figures, packages=('transformers',))}")


if __name__ == "__main__":
    main()
