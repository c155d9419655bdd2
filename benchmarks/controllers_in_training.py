"""How near to its target each controller brings the KL within fifty steps of the demonstration's task.

python benchmarks/controllers.py                                  # three controllers, three seeds: 9 runs, about a
                                                                  # minute each on an idle core
python benchmarks/controllers.py --target 4 --beta 0.3 --seeds 0  # another target, another start
python benchmarks/controllers.py --draw                           # the figure of docs/beta.md, from the results

The task is that of ``kleash train``: the shipped reference, its 24 shortest prompts, a reward for "she" and "her";
24 responses a step. Figures are the mean KL of the last 15 steps over the target, its highest step over the target,
and the beta of the last step. The table of docs/beta.md is printed from ``results/controllers.json``.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import RESULTS, write_result

from kleash.jobs import PPOJob
from kleash.jobs.option_groups import SHIPPED_PROMPTS, SHIPPED_REFERENCE
from kleash.models import load_pair, read_prompts
from kleash.store import read_steps
from kleash.training import train
from kleash.training.demonstration import DemonstrationSettings

CONTROLLERS = ("pid", "ziegler", "dual")
LAST = 15
NAME = "controllers_in_training"
PICTURE = RESULTS.parents[1] / "docs" / "images" / "controllers.svg"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one run."""

    controller: str
    seed: int
    settled: float
    """Mean KL of the last ``LAST`` steps over the target."""
    highest: float
    """Highest KL of a step over the target."""
    beta: float
    """Beta of the last step."""
    kl: tuple[float, ...]
    """KL of each step, in nats per response."""


def run(controller: str, seed: int, options: argparse.Namespace, folder: Path) -> Figures:
    """Train with one controller and one seed; the figures of the run."""
    settings = DemonstrationSettings()
    out = folder / f"{controller}-{seed}"
    job = PPOJob(
        prompts=str(folder / "prompts.jsonl"),
        controller=controller,
        beta=options.beta,
        target_nats=options.target,
        lora_rank=8,
        minibatches=1,
        epochs=1,
        steps=options.steps,
        prompts_per_step=settings.prompts,
        samples_per_prompt=1,
        max_new_tokens=settings.max_new_tokens,
        learning_rate=options.learning_rate,
        checkpoint_every=options.steps,
        seed=seed,
        out=str(out),
    )
    train(job)
    steps = [record.metrics for record in read_steps(out)]
    kl = [metrics["kl/exact_per_sequence"] for metrics in steps]
    return Figures(
        controller=controller,
        seed=seed,
        settled=sum(kl[-LAST:]) / len(kl[-LAST:]) / options.target,
        highest=max(kl) / options.target,
        beta=steps[-1]["beta"],
        kl=tuple(round(x, 3) for x in kl),
    )


def write_prompts(folder: Path) -> None:
    """Write the prompts of the demonstration to ``prompts.jsonl`` in the folder."""
    pair = load_pair(SHIPPED_REFERENCE, SHIPPED_REFERENCE)
    prompts = sorted(read_prompts(SHIPPED_PROMPTS, pair), key=lambda prompt: len(prompt.token_ids))
    lines = [
        json.dumps({"prompt": prompt.text}, ensure_ascii=False) + "\n"
        for prompt in prompts[: DemonstrationSettings().prompts]
    ]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def table(runs: list[dict[str, Any]]) -> list[str]:
    """The figures as lines of Markdown: a row for each controller."""
    seeds = sorted({record["seed"] for record in runs})
    heads = [f"seed {seed}" for seed in seeds]
    lines = [
        f"| controller | {' | '.join(heads)} | highest step |",
        "|---|" + "---:|" * (len(seeds) + 1),
    ]
    for controller in dict.fromkeys(record["controller"] for record in runs):
        by_seed = {record["seed"]: record for record in runs if record["controller"] == controller}
        cells = [f"{by_seed[seed]['settled']:.2f}" if seed in by_seed else "–" for seed in seeds]
        highest = max(record["highest"] for record in by_seed.values())
        lines.append(f"| `{controller}` | {' | '.join(cells)} | {highest:.1f} |")
    return lines


COLOURS = {"pid": "#2457c5", "ziegler": "#d9782d", "dual": "#2a9d6f"}
WIDE, HIGH, LEFT, TOP, MOST = 640, 240, 48, 40, 4.0


def picture(figures: dict[str, Any]) -> str:
    """The KL of every run over its target, step by step, as SVG."""
    target, steps = figures["asked"]["target_nats"], figures["asked"]["steps"]

    def height(share: float) -> float:
        return TOP + HIGH * (1 - min(share, MOST) / MOST)

    top, bottom = height(1.15), height(0.85)
    band = f'x="{LEFT}" y="{top:.1f}" width="{WIDE}" height="{bottom - top:.1f}" fill="#2457c5" opacity=".13"'
    parts = [f"<rect {band}/>"]
    for share in range(int(MOST) + 1):
        y = height(share)
        parts.append(f'<path d="M{LEFT} {y:.1f}h{WIDE}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share}</text>')
    for step in range(0, steps + 1, 10):
        x = LEFT + WIDE * step / steps
        parts.append(f'<text x="{x:.1f}" y="{TOP + HIGH + 18}" text-anchor="middle">{step}</text>')
    for record in figures["runs"]:
        points = "L".join(
            f"{LEFT + WIDE * at / steps:.1f} {height(kl / target):.1f}"
            for at, kl in enumerate(record["kl"], 1)
        )
        parts.append(
            f'<path d="M{points}" fill="none" stroke="{COLOURS[record["controller"]]}" stroke-width="1.6"/>'
        )
    for at, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<path d="M{LEFT + 90 * at} 18h22" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 90 * at + 28}" y="22">{name}</text>')
    parts.append(f'<text x="{LEFT + 300}" y="22">KL over its target, by step; shaded: within 15 %</text>')
    style = "<style>text{font:12px system-ui,sans-serif;fill:#333}</style>"
    style += "<rect width='100%' height='100%' fill='#fff'/>"
    size = f'width="{LEFT + WIDE + 24}" height="{TOP + HIGH + 32}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}\n' + "\n".join(parts) + "\n</svg>\n"


def main(arguments: list[str] | None = None) -> None:
    """Train, write the figures and print the table; or only draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS), choices=CONTROLLERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=8.0, help="nats per response")
    parser.add_argument("--beta", type=float, default=0.05, help="initial beta")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=DemonstrationSettings().learning_rate)
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder that the figures are written to"
    )
    parser.add_argument(
        "--draw", action="store_true", help="draw docs/images/controllers.svg again, without training"
    )
    options = parser.parse_args(arguments)
    if options.draw:
        figures = json.loads((options.results / f"{NAME}.json").read_text())["figures"]
        PICTURE.write_text(picture(figures), encoding="utf-8")
        print("\n".join(table(figures["runs"])))
        return
    runs: list[dict[str, Any]] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder)
        jobs = [
            (controller, seed, options, folder)
            for controller in options.controllers
            for seed in options.seeds
        ]
        with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
            for result in pool.map(run, *zip(*jobs, strict=True)):
                runs.append({**vars(result), "kl": list(result.kl)})
                print(
                    f"{result.controller}, seed {result.seed}: {result.settled:.2f} of the target", flush=True
                )
    settings = {"target_nats": options.target, "beta": options.beta, "steps": options.steps}
    settings["learning_rate"] = options.learning_rate
    write_result(NAME, {"asked": settings, "runs": runs}, options.results)
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
