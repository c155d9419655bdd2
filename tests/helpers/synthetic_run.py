"""Run folders whose numbers look real and whose text is hostile, made without any model."""

import math
import re
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from kleash.records import (
    STATISTICS,
    ComparedRun,
    Comparison,
    Counts,
    Measurement,
    Number,
    RunDifference,
    RunFolder,
)
from kleash.store.job_folder import RunHeader
from kleash.store.measurement import (
    Bin,
    ConvergencePoint,
    Drifted,
    EstimatorRecord,
    ModelRecord,
    PromptDrift,
    SequenceTotal,
)
from kleash.store.sweep import Sweep, SweepCandidate, SweepPair

SCRIPTS = (
    "<script>window.__pwned=1;alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "<!--<script>",
)
MARKUP = ("{{ 7*7 }}{% raw %}", '"><b onmouseover=alert(3)>')
SPACES = ("\n", "\n\n", "\t", "   ", "")
UNICODE = (" שלום", "مرحبا", "\u202eevil\u202c", "👩‍👩‍👧‍👦", " e\u0301", "\ufffd", "\x00\x1b[31m", "\u2028")
HOSTILE = (*SCRIPTS, *MARKUP, *SPACES, *UNICODE, "&amp;", "supercalifragilistic" * 5)
PROSE = (
    "It was the first warm evening of the year, and nobody in the house could be persuaded to stay indoors. "
    "The lamps were carried out to the terrace, the chairs were carried after them, and by nine o'clock the "
    "whole company was talking at once about the wedding, the weather and the price of hay. Mr. Bennet alone "
    "had kept his book. He turned a page now and then, chiefly to show that he was not listening, and heard "
    'every word. "You are very quiet, sir," said Elizabeth. "I am reading," he answered, "which is the '
    'only polite way of being silent." She laughed, and sat down beside him to watch the moths.'
)
PIECES = re.findall(r"\s?\w{1,5}|\s?[^\w\s]", PROSE)
PROMPTS = (
    "Continue: It was the first warm evening of the year,",
    "Write a letter from Elizabeth to her sister about the ball.",
    "Why did nobody in the house stay indoors?",
    "Describe the terrace at nine o'clock.\nUse short sentences.",
    "What does Mr. Bennet think of the price of hay?",
)


@dataclass
class Synthetic:
    """The columns of a run, before they are written."""

    tokens: dict[str, list[Any]] = field(default_factory=dict)
    sequences: dict[str, list[Any]] = field(default_factory=dict)


def number(values, unit="nats", **more):
    """The mean of ``values`` with its plain standard error."""
    values = np.asarray(values, dtype=np.float64)
    mean, error = float(values.mean()), float(values.std() / np.sqrt(max(1, values.size)))
    return Number(
        value=mean, unit=unit, standard_error=error, ci95=(mean - 2 * error, mean + 2 * error), **more
    )


def columns(prompts, samples, tokens, seed, scale, hostile):
    """Token and sequence columns; drift falls with the position and differs from prompt to prompt."""
    draw = np.random.default_rng(seed)
    run = Synthetic()
    for prompt in range(prompts):
        text = PROMPTS[prompt % len(PROMPTS)] + (f" ({prompt})" if prompt >= len(PROMPTS) else "")
        if hostile and prompt == 1:
            text = "<script>alert('prompt')</script> " + text
        level = scale * draw.lognormal(0, 0.7)
        for sample in range(samples):
            length = int(draw.integers(tokens // 2, tokens + 1))
            start = int(draw.integers(0, len(PIECES)))
            pieces = [PIECES[(start + at) % len(PIECES)] for at in range(length)]
            if hostile:
                for at, bad in enumerate(HOSTILE):
                    pieces[2 * at + 2] = bad
            add_sequence(run, draw, (prompt, sample), text, pieces, level)
    return run


def add_sequence(run, draw, key, prompt, pieces, level):
    """One sequence's columns, appended to ``run``."""
    size = len(pieces)
    at = np.arange(size)
    top_reference = draw.beta(1.6, 1.1, size)
    kl = level * (1 + 2.5 * np.exp(-at / 6)) * (1.15 - top_reference) * draw.lognormal(-1.1, 1.5, size)
    top_policy = np.clip(top_reference + draw.normal(0, 0.1, size), 0.02, 0.999)
    logp = -draw.exponential(1.0, size)
    drawn = {
        "prompt_id": np.full(size, key[0]),
        "sample_id": np.full(size, key[1]),
        "position": at,
        "token_id": draw.integers(0, 4096, size),
        "text": pieces,
        "logp_policy": logp,
        "logp_reference": np.minimum(-1e-4, logp - draw.normal(0.6 * np.sqrt(kl), np.sqrt(kl))),
        "logp_sampled": logp,
        "kl_policy_reference": kl,
        "kl_reference_policy": kl * draw.lognormal(0.1, 0.4, size),
        "jensen_shannon": np.minimum(kl / 7, 0.69),
        "total_variation": np.minimum(np.sqrt(kl / 2.4), 1),
        "entropy_policy": 2.6 * (1 - top_policy),
        "entropy_reference": 3.1 * (1 - top_reference),
        "top1_policy": draw.integers(0, 9, size),
        "top1_reference": draw.integers(0, 9, size),
        "top1_probability_policy": top_policy,
        "top1_probability_reference": top_reference,
        "rank_reference": draw.geometric(0.5, size) - 1,
    }
    for name, values in drawn.items():
        run.tokens.setdefault(name, []).extend(values if isinstance(values, list) else values.tolist())
    row = {"prompt_id": key[0], "sample_id": key[1], "prompt_hash": f"{key[0]:08x}", "prompt": prompt}
    row |= {"response": "".join(pieces), "finish_reason": "stop", "tokens": size}
    for name, value in row.items():
        run.sequences.setdefault(name, []).append(value)


def write_synthetic_run(
    folder, *, prompts=40, samples=2, tokens=96, seed=0, scale=0.25, hostile=True, shards=2, changes=None
):
    """Write a run folder, ``changes`` replacing fields of its measurement; the measurement is returned."""
    run = columns(prompts, samples, tokens, seed, scale, hostile)
    target = RunFolder(folder)
    header = RunHeader(kleash="0.1.0", settings={}, source_sha256="ab" * 32, fingerprints={})
    cuts = [round(at * prompts / shards) for at in range(shards + 1)]
    with target.writing(header, resume=False):
        for shard in range(shards):
            low, high = cuts[shard], cuts[shard + 1]
            target.write_shard(shard, between(run.tokens, low, high), between(run.sequences, low, high))
        measurement = measurement_of(run, prompts, samples, shards, hostile)
        if changes:
            measurement = replace(measurement, **changes)
        target.write_alternatives(alternatives(run, measurement, seed, hostile))
        target.write_measurement(measurement)
    return measurement


def between(table, low, high):
    """The rows whose prompt lies in ``[low, high)``."""
    keep = [low <= prompt < high for prompt in table["prompt_id"]]
    return {name: [v for v, k in zip(values, keep, strict=True) if k] for name, values in table.items()}


def alternatives(run, measurement, seed, hostile):
    """Five tokens of each model at every position of the worst sequences."""
    draw = np.random.default_rng(seed + 1)
    worst = {(found.prompt_id, found.sample_id) for found in measurement.worst_sequences}
    table = {name: [] for name in ALTERNATIVES}
    words = [*PIECES[:60], *(HOSTILE if hostile else ())]
    rows = zip(run.tokens["prompt_id"], run.tokens["sample_id"], run.tokens["position"], strict=True)
    for row, (prompt, sample, position) in enumerate(rows):
        if (prompt, sample) not in worst:
            continue
        tops = [run.tokens[f"top1_probability_{who}"][row] for who in ("policy", "reference")]
        for place in reversed(range(5)):
            chosen = draw.integers(0, len(words), 2)
            shares = [top if place == 0 else (1 - top) * 0.5**place for top in tops]
            values = (prompt, sample, position, place, int(chosen[0]), words[chosen[0]], shares[0],
                      int(chosen[1]), words[chosen[1]], shares[1])  # fmt: skip
            for name, value in zip(ALTERNATIVES, values, strict=True):
                table[name].append(value)
    return table


ALTERNATIVES = (
    "prompt_id", "sample_id", "position", "place", "token_id_policy", "text_policy", "probability_policy",
    "token_id_reference", "text_reference", "probability_reference",
)  # fmt: skip


def measurement_of(run, prompts, samples, shards, hostile):
    """The measurement of such columns; means are right, errors are plain."""
    token = {name: np.asarray(v) for name, v in run.tokens.items() if name != "text"}
    kl = token["kl_policy_reference"]
    keys = list(zip(run.tokens["prompt_id"], run.tokens["sample_id"], strict=True))
    sums = {}
    for key, value in zip(keys, kl, strict=True):
        sums[key] = sums.get(key, 0.0) + float(value)
    total = np.asarray(list(sums.values()))
    name = "shipped:policy" if not hostile else "runs/<script>alert('path')</script>/policy"
    sizes = {"dtype": "float32", "parameters": 2_359_680, "vocabulary": 4096}
    model = ModelRecord(path="shipped:reference", revision=None, fingerprint="5d41402abc4b2a76", **sizes)
    return Measurement(
        kleash="0.1.0",
        estimand="KL(policy ‖ reference) in nats per token: the exact next-token divergence, averaged over "
        "the policy's own responses to the prompts, every token of a response counted once, at temperature 1",
        job={"policy": name, "reference": "shipped:reference", "prompts": "it's prompts.jsonl", "seed": 3,
             "samples_per_prompt": samples, "resume": True, "out": "drift"},
        source_sha256="ab" * 32,
        models={"policy": replace(model, path=name), "reference": model},
        counts=Counts(prompts=prompts, sequences=len(sums), tokens=len(kl), clusters=prompts,
                      truncated_sequences=3, shards=shards),
        per_token={n: number(v, unit_of(n)) for n, v in token.items() if n not in IDS},
        per_sequence=SequenceTotal(kl_policy_reference=number(total), control_variate_weight=0.93,
                                   monte_carlo=number(total * 1.04), exact_terms=number(total),
                                   largest_token=number(total / 4)),
        estimators=estimators(token),
        estimators_note="one draw per position, weighted like the exact KL; positions drawn from the policy",
        quantiles={n: quantiles(token[n]) for n in ("kl_policy_reference", "kl_reference_policy")},
        by_position=bins(token["position"], kl, [0, 1, 2, 4, 8, 16, 32, 64]),
        by_confidence=bins(token["top1_probability_reference"], kl, [0, 0.25, 0.5, 0.75, 0.95, 1.0]),
        top1_agreement=number(token["top1_policy"] == token["top1_reference"], "probability"),
        perplexity={"policy": number(np.exp(-token["logp_policy"]), "none"),
                    "reference": number(np.exp(-token["logp_reference"]), "none"),
                    "ratio": number(np.exp(token["logp_reference"] - token["logp_policy"]), "none")},
        probability_change={"mean": number(np.exp(token["logp_policy"]) - np.exp(token["logp_reference"]),
                                           "probability"),
                            "rms": number([0.1, 0.12], "probability")},
        top_percent_share=float(np.sort(kl)[-max(1, len(kl) // 100):].sum() / kl.sum()),
        noise_floor=Number(value=3.1e-8, unit="nats", standard_error=2e-9, ci95=(2.7e-8, 3.5e-8)),
        dtype_gap=None,
        convergence=running(kl),
        worst_tokens=worst_tokens(run, kl),
        worst_sequences=worst_sequences(sums, keys),
        prompts=by_prompt(run, kl),
        warnings=("only 40 clusters: the interval leans on few prompts",) if prompts <= 40 else (),
        notes=("the reference is the policy's base model; both were loaded once",),
        seconds=41.7,
        finished="2026-05-04 10:11:12",
        versions={"python": "3.11.2", "torch": "2.13.0", "transformers": "5.23.0"},
    )  # fmt: skip


IDS = ("prompt_id", "sample_id", "position", "token_id", "top1_policy", "top1_reference", "logp_sampled")


def unit_of(name):
    """The unit of a column's mean."""
    if name in STATISTICS:
        return STATISTICS[name].unit
    if "probability" in name:
        return "probability"
    return "none" if name.startswith("rank") else "nats"


def estimators(token):
    ratio = token["logp_policy"] - token["logp_reference"]
    kl = token["kl_policy_reference"]
    values = {"k1": ratio, "abs": np.abs(ratio), "k2": ratio**2 / 2, "k3": np.expm1(-ratio) + ratio}
    return {
        name: EstimatorRecord(**vars(number(v)), bias=number(v - kl), spread=float((v - kl).std()))
        for name, v in values.items()
    }


def quantiles(values):
    found = {}
    for level in ("50", "75", "90", "95", "99", "99.9", "max"):
        value = float(values.max() if level == "max" else np.quantile(values, float(level) / 100))
        error = math.nan if level == "max" else value / 12
        found[level] = Number(
            value=value, unit="nats", standard_error=error, ci95=(value - 2 * error, value + 2 * error)
        )
    return found


def bins(by, kl, edges):
    found = []
    for low, high in pairwise(edges):
        inside = (by >= low) & ((by < high) | ((high == edges[-1]) & (by == high)))
        if inside.any():
            share = float(kl[inside].sum() / kl.sum())
            found.append(Bin(low=float(low), high=float(high), tokens=int(inside.sum()), share_of_kl=share,
                             kl=number(kl[inside])))  # fmt: skip
    return tuple(found)


def running(kl):
    found = []
    for tokens in np.unique(np.linspace(max(2, len(kl) // 40), len(kl), 40).astype(int)):
        now = number(kl[:tokens])
        found.append(ConvergencePoint(tokens=int(tokens), mean=now.value, ci95=now.ci95))
    return tuple(found)


def worst_tokens(run, kl):
    return tuple(
        Drifted(prompt_id=run.tokens["prompt_id"][at], sample_id=run.tokens["sample_id"][at], kl=float(kl[at]),
                position=run.tokens["position"][at], text=run.tokens["text"][at])
        for at in np.argsort(-kl)[:50].tolist()
    )  # fmt: skip


def worst_sequences(sums, keys):
    ordered = sorted(sums, key=lambda key: -sums[key])[:50]
    return tuple(Drifted(prompt_id=k[0], sample_id=k[1], kl=sums[k], tokens=keys.count(k)) for k in ordered)


def by_prompt(run, kl):
    of = np.asarray(run.tokens["prompt_id"])
    texts = dict(zip(run.sequences["prompt_id"], run.sequences["prompt"], strict=True))
    found = []
    for prompt, text in texts.items():
        mine, samples = kl[of == prompt], run.sequences["prompt_id"].count(prompt)
        found.append(PromptDrift(prompt_id=prompt, prompt=text, sequences=samples, tokens=mine.size,
                                 kl_per_token=float(mine.mean()), kl_per_sequence=float(mine.sum() / samples),
                                 kl_max=float(mine.max())))  # fmt: skip
    return tuple(sorted(found, key=lambda p: -p.kl_per_token)[:500])


def synthetic_comparison():
    """Three runs, the last of which shares few prompts with the first."""
    draw = np.random.default_rng(5)
    names = ("step 100", "step 400", "<script>alert('run')</script>")
    runs = tuple(
        ComparedRun(name=name, folder=f"runs/{at}", estimand="KL(policy ‖ reference) in nats per token",
                    policy=f"runs/{at}/policy", reference="shipped:reference",
                    counts=Counts(prompts=200, sequences=400, tokens=50_000, clusters=200,
                                  truncated_sequences=0, shards=2),
                    numbers=compared(draw, 0.1 * (at + 1)))
        for at, name in enumerate(names)
    )  # fmt: skip
    differences = tuple(
        RunDifference(name=names[at], minus=names[0], shared_prompts=200 - 150 * (at - 1), only_here=3,
                      only_there=150 * (at - 1) + 3,
                      differences=compared(draw, 0.1 * at if at == 1 else 0.005),
                      warnings=("few shared prompts",) if at == 2 else ())
        for at in (1, 2)
    )  # fmt: skip
    return Comparison(kleash="0.1.0", runs=runs, differences=differences, warnings=("sources differ",))


def write_sweep_folder(folder, sweep):
    """Write the folder of a sweep, whose candidates' measurements are empty files; the sweep as it is there."""
    candidates = []
    for each in sweep.candidates:
        path = folder / each.folder / "measurement.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        candidates.append(each if each.failure else replace(each, measurement_sha256=sha256().hexdigest()))
    written = replace(sweep, candidates=tuple(candidates))
    written.write(folder)
    return written


def synthetic_sweep(names=("q8", "q6", "q4"), failed=("torn",)):
    """Candidates of falling size and rising KL, each one different from the others, and some that failed."""
    draw = np.random.default_rng(7)
    measured = []
    for at, name in enumerate(names):
        numbers = compared(draw, 0.01 * 4 ** (at % 10))
        numbers["kl_policy_reference_99.9"] = number(draw.normal(0.5 * 4 ** (at % 10), 0.1, 300))
        sizes = {"bytes_on_disk": 8_000_000_000 // (at + 1), "bits_per_weight": 8.0 / (at + 1)}
        place = {"number": at + 1, "name": name, "folder": f"candidates/{at + 1:02d}"}
        letters = "abcdefghij"[at % 10]
        measured.append(
            SweepCandidate(**place, **sizes, numbers=numbers, letters=letters, is_on_pareto_front=True)
        )
    torn = tuple(
        SweepCandidate(number=len(names) + at + 1, name=name, folder="x", failure="its weights are missing")
        for at, name in enumerate(failed)
    )
    pairs = []
    for first, second in combinations(range(1, len(names) + 1), 2):
        difference = number(draw.normal(-0.1 * (second - first), 0.05, 300))
        ends = {"simultaneous_ci95": (-1.0, -0.01), "is_tie": False}
        pairs.append(SweepPair(first=first, second=second, difference=difference, **ends))
    return Sweep(
        kleash="0.1.0",
        reference="base",
        rank_by="kl_policy_reference",
        job={},
        candidates=(*measured, *torn),
        pairs=tuple(pairs),
        clusters=300,
        tokens=50_000,
        critical_value=2.4,
    )


def compared(draw, scale):
    units = {"kl_policy_reference": "nats", "kl_reference_policy": "nats", "jensen_shannon": "nats",
             "total_variation": "probability", "entropy_policy": "nats", "entropy_reference": "nats",
             "top1_agreement": "probability"}  # fmt: skip
    return {name: number(draw.normal(scale, max(0.05, 2 * scale), 300), unit) for name, unit in units.items()}
