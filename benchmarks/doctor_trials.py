"""Judges kleash doctor on planted causes that no threshold was set with: python benchmarks/doctor_trials.py

``doctor_plants.py`` draws the rollouts of 20 planted causes and of clean runs; ``kleash.diagnosis.diagnose`` gets them
with and without the models, and of its answer ``findings[*].cause`` and ``.probability`` are read. A cause is named
rightly if the first finding is one of those accepted for the plant. docs/reference/evidence.md has the figures.

What was drawn is kept in a temporary folder, or in that of $KLEASH_DOCTOR_TRIALS.
"""

import argparse
import hashlib
import os
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doctor_drawing import cache_folder, pool
from doctor_plants import PLANTS, UNSEEN_WITHOUT_MODELS, Case, Rollouts, clean
from harness import RESULTS, markdown_table, write_result

from kleash.diagnosis import RolloutRecord, diagnose
from kleash.models import Pair, load_pair

CLEAN, UNEXPLAINED = "clean", "unexplained"
MODES = ("with_models", "without_models")
BINS = (0.0, 0.25, 0.5, 0.7, 0.85, 0.95, 1.0)
"""Edges of the reliability curve."""
LEAST_IN_BIN = 20
"""Findings in a bin from which its calibration is judged."""
Trial = dict[str, Any]


def rollouts_of(plant: str, seed: int) -> Rollouts:
    """The rollouts of a trial, drawn once and then read from a file named by the text of the generator."""
    texts = [Path(__file__).with_name(f"doctor_{name}.py").read_bytes() for name in ("drawing", "plants")]
    key = hashlib.sha256(b"".join(texts)).hexdigest()[:12]
    path = cache_folder() / f"{key}-{plant}-{seed}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    case = Case(plant=plant, seed=seed)
    rollouts = clean(case) if plant == CLEAN else PLANTS[plant](case)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(pickle.dumps(rollouts))
    partial.replace(path)
    return rollouts


def records_of(rollouts: Rollouts) -> list[RolloutRecord]:
    """Rollouts as the doctor's records."""
    ends = np.cumsum([len(response.tokens) for response in rollouts.responses]).tolist()
    counted = np.ones(ends[-1], dtype=bool) if rollouts.is_counted is None else rollouts.is_counted
    records = []
    for number, (response, end) in enumerate(zip(rollouts.responses, ends, strict=True)):
        part = slice(end - len(response.tokens), end)
        records.append(
            RolloutRecord(
                prompt_ids=response.prompt,
                response_ids=response.tokens,
                trainer=rollouts.trainer[part],
                engine=rollouts.engine[part],
                reference=None if rollouts.reference is None else rollouts.reference[part],
                is_counted=counted[part],
                location=f"response {number}",
            )
        )
    return records


@cache
def pair_of(names: tuple[str, str]) -> Pair:
    """The models of a trial."""
    return load_pair(*names, dtype="float32")


def trial(plant: str, seed: int, modes: Sequence[str]) -> Trial:
    """What is planted in a trial, and the findings in each mode."""
    torch.set_num_threads(1)
    start = time.process_time()
    rollouts = rollouts_of(plant, seed)
    records = records_of(rollouts)
    drawn = time.process_time()
    row: Trial = {
        "plant": plant,
        "seed": seed,
        "variant": rollouts.variant,
        "responses": len(records),
        "tokens": len(rollouts.trainer),
        "rounding": rollouts.rounding,
        "noise_kind": rollouts.noise_kind,
        "noise_nats": float(f"{rollouts.noise:.4g}"),
        "effect_nats": float(f"{rollouts.effect:.4g}"),
        "ratio": float(f"{rollouts.ratio:.4g}"),
        "accepted": {"with_models": rollouts.accepted, "without_models": rollouts.accepted_without},
        "seconds": {"drawing": round(drawn - start, 2)},
    }
    for mode in modes:
        start = time.process_time()
        pair = pair_of(rollouts.pair) if mode == "with_models" else None
        findings = diagnose(records, pair=pair, rounding=rollouts.rounding).findings
        row[mode] = [[finding.cause, round(finding.probability, 4)] for finding in findings]
        row["seconds"][mode] = round(time.process_time() - start, 2)
    return row


def is_named(row: Trial, mode: str) -> bool:
    """Whether the first finding is right; of a clean run, whether there is none."""
    if row["plant"] == CLEAN:
        return not row[mode]
    return bool(row[mode]) and row[mode][0][0] in row["accepted"][mode]


def is_wrong(row: Trial, mode: str) -> bool:
    """Whether a cause that is not right has a probability of at least a half."""
    return any(
        probability >= 0.5 and cause != UNEXPLAINED and cause not in row["accepted"][mode]
        for cause, probability in row[mode]
    )


def is_missed(row: Trial, mode: str) -> bool:
    """Whether the first finding is none of those accepted, or a wrong one has half of the probability."""
    return not is_named(row, mode) or is_wrong(row, mode)


def is_unexplained(row: Trial, mode: str) -> bool:
    """Whether the first finding is that no cause explains the differences."""
    return bool(row[mode]) and row[mode][0][0] == UNEXPLAINED


def cell(rows: Sequence[Trial], mode: str) -> str:
    """How many trials of a plant were named rightly, and what was named in place of it."""
    rows = [row for row in rows if mode in row]
    other: dict[str, int] = {}
    for row in rows:
        if not is_named(row, mode):
            name = row[mode][0][0] if row[mode] else "nothing"
            other[name] = other.get(name, 0) + 1
    wrong = ", ".join(f"{name} {count}" for name, count in sorted(other.items(), key=lambda item: -item[1]))
    return f"{len(rows) - sum(other.values())} of {len(rows)}" + (f" ({wrong})" if wrong else "")


def causes_table(rows: Sequence[Trial]) -> str:
    """Each plant: how many were named first with and without the models, and what else was."""
    lines: list[list[str]] = []
    for plant in dict.fromkeys(row["plant"] for row in rows):
        of_plant = [row for row in rows if row["plant"] == plant]
        note = " (not to be seen)" if plant in UNSEEN_WITHOUT_MODELS else ""
        lines.append([plant, cell(of_plant, MODES[0]), f"{cell(of_plant, MODES[1])}{note}"])
    return markdown_table(["planted", "named first, with the models", "without them"], lines)


def reliability(rows: Iterable[Trial], modes: Sequence[str]) -> list[tuple[float, float, int, float, float]]:
    """Of all causes named in each bin of stated probability: edges, number, mean of the stated, share right."""
    named = [
        (probability, cause in row["accepted"][mode])
        for row in rows
        for mode in modes
        if mode in row
        for cause, probability in row[mode]
        if cause != UNEXPLAINED
    ]
    curve = []
    for low, high in pairwise(BINS):
        inside = [(p, right) for p, right in named if low <= p < high or (high == BINS[-1] and p == high)]
        if inside:
            stated, share = np.mean(inside, axis=0)
            curve.append((low, high, len(inside), float(stated), float(share)))
    return curve


def reliability_table(rows: Sequence[Trial]) -> str:
    """The reliability curve of both modes together."""
    lines = [
        [f"{low:.2f} to {high:.2f}", str(count), f"{stated:.2f}", f"{share:.2f}"]
        for low, high, count, stated, share in reliability(rows, MODES)
    ]
    return markdown_table(["stated probability", "causes named", "mean stated", "share right"], lines)


def share_of(rows: Sequence[Trial], mode: str, is_so: Any) -> tuple[int, int]:
    """How many trials of a mode are so, and how many there are."""
    seen = [row for row in rows if mode in row]
    return sum(is_so(row, mode) for row in seen), len(seen)


def bars(rows: Sequence[Trial]) -> list[tuple[str, str, bool]]:
    """Each bar: what it is, its figure, and whether it is met."""
    planted = [row for row in rows if row["plant"] != CLEAN]
    tellable = [row for row in planted if row["plant"] not in UNSEEN_WITHOUT_MODELS]
    results: list[tuple[str, str, bool]] = []

    def judge(what: str, counts: tuple[int, int], least: float, most: float = 1.0) -> None:
        if counts[1]:
            share = counts[0] / counts[1]
            results.append((what, f"{counts[0]} of {counts[1]}, {100 * share:.1f} %", least <= share <= most))

    judge("named first with the models: 90 %", share_of(planted, MODES[0], is_named), 0.9)
    judge(
        "named first without the models, of those that show: 80 %",
        share_of(tellable, MODES[1], is_named),
        0.8,
    )
    for mode in MODES:
        words = mode.replace("_", " ")
        judge(
            f"a wrong cause at 50 % or more, {words}: at most 3 %", share_of(planted, mode, is_wrong), 0, 0.03
        )
        seen = planted if mode == MODES[0] else tellable
        judge(f"unexplained, {words}: at most 10 %", share_of(seen, mode, is_unexplained), 0, 0.1)
        cleans = [row for row in rows if row["plant"] == CLEAN]
        judge(f"clean runs without a finding, {words}: all", share_of(cleans, mode, is_named), 1.0)
    curve = [(abs(stated - share), count) for *_, count, stated, share in reliability(rows, MODES)]
    farthest = max((error for error, count in curve if count >= LEAST_IN_BIN), default=float("nan"))
    results.append(
        (
            f"stated less right share, bins of {LEAST_IN_BIN} or more: at most 0.1",
            f"{farthest:.3f}",
            farthest <= 0.1,
        )
    )
    return results


def summary(rows: Sequence[Trial]) -> str:
    """All tables."""
    of_bars = [[what, figure, "yes" if is_met else "NO"] for what, figure, is_met in bars(rows)]
    tables = (causes_table(rows), reliability_table(rows), markdown_table(["bar", "figure", "met"], of_bars))
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Planted causes and clean runs, with and without the models."
    )
    parser.add_argument("--seeds", type=int, default=20, help="trials of each plant")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--plants", nargs="*", default=[*PLANTS], choices=[*PLANTS])
    parser.add_argument("--clean", type=int, default=300, help="clean runs")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--with-models", action="store_true", help="with the models alone")
    parser.add_argument("--without-models", action="store_true", help="without the models alone")
    parser.add_argument("--name", default="doctor_trials", help="of the file of results")
    options = parser.parse_args()
    both = options.with_models == options.without_models
    modes = MODES if both else (MODES[0],) if options.with_models else (MODES[1],)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    jobs = [(plant, seed) for seed in seeds for plant in options.plants]
    jobs += [(CLEAN, options.first_seed + number) for number in range(options.clean)]
    rows: list[Trial] = []
    torch.set_num_threads(1)
    for name in ("policy", "reference"):  # once, before the processes
        pool(name)
    start = time.perf_counter()
    with ProcessPoolExecutor(options.processes) as executor:
        for future in [executor.submit(trial, *job, modes) for job in jobs]:
            row = future.result()
            rows.append(row)
            for mode in modes:
                if is_missed(row, mode):
                    print(f"  {row['plant']} {row['seed']} {row['variant']}, {mode}: {row[mode]}", flush=True)
    rows.sort(key=lambda row: [*PLANTS, CLEAN].index(row["plant"]))
    print(summary(rows))
    figures: Mapping[str, Any] = {
        "what": "the findings for planted faults and clean runs of the shipped pair",
        "seconds": round(time.perf_counter() - start, 1),
        "bars": [list(bar) for bar in bars(rows)],
        "reliability": reliability(rows, MODES),
        "causes": causes_table(rows),
        "missed": [row for row in rows if any(is_missed(row, mode) for mode in modes)],
    }
    print(f"\n{write_result(options.name, dict(figures), RESULTS, packages=('transformers',))}")


if __name__ == "__main__":
    main()
