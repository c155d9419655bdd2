"""The targets of docs/performance.md: limit, measured value, and the reason if a target is missed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Any]
Values = dict[str, float]
EAGER, COMPILED = "kleash", "kleash compiled"
MATMULS = {"matmuls": "the four bare matmuls", "matmuls by oneDNN": "the four matmuls, three by oneDNN"}
PEAK = "peak"
BARE = {**MATMULS, PEAK: "the same arithmetic on registers alone"}
MAIN, TRAINING = "linear_peers_main", "linear_training"


def wording(figures: Figures) -> dict[str, str]:
    """The names of the methods on the page."""
    return {**BARE, **figures["words"]}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A target for a measured value."""

    words: str
    limit: float
    result: str
    """Name of the result file."""
    values: Callable[[Figures], Values]
    """Extracts the values from the figures, by "kleash" (eager) and "kleash compiled"."""
    because: Callable[[Figures], str]
    """The reason that is given if the target is missed."""
    least: bool = False
    """Whether ``limit`` is a lower limit."""
    form: str = "{:.2f} ×"

    def reached(self, value: float) -> bool:
        """Whether ``value`` is within the limit."""
        return value >= self.limit if self.least else value <= self.limit


def of_matmuls(*names: str) -> Callable[[Figures], Values]:
    """Ratios of kleash to the four matmuls."""
    return lambda figures: {
        name: figures["results"][name]["of_matmuls"] for name in names if name in figures["results"]
    }


def of_peer(peer: str) -> Callable[[Figures], Values]:
    """Ratios of kleash to a peer."""
    return lambda figures: {
        name: figures["results"][peer][f"{name} of it"]
        for name in (EAGER, COMPILED)
        if f"{name} of it" in figures["results"].get(peer, {})
    }


def of_training(**ratios: tuple[str, str]) -> Callable[[Figures], Values]:
    """Ratios from linear_training.py; for each column, numerator and denominator."""
    names = {"eager": EAGER, "compiled": COMPILED}
    return lambda figures: {
        names[column]: figures["ratios"][ours][rival]
        for column, (ours, rival) in ratios.items()
        if rival in figures["ratios"].get(ours, {})
    }


def beside(peer: str, limit: float) -> Callable[[Figures], str]:
    """The reason for a missed target against a peer: the share of its time that the matmuls take."""

    def explain(figures: Figures) -> str:
        results = figures["results"]
        least_time = min(results[name]["of_matmuls"] for name in MATMULS if name in results)
        alone = least_time / results[peer]["of_matmuls"]
        words = f"The four matmuls alone take {alone:.2f} × its time on this machine"
        if alone > limit:
            words += ", so that no gradient computed with them can reach the target"
        if PEAK in results:
            peak = results[PEAK]["of_matmuls"] / results[peer]["of_matmuls"]
            words += f"; their arithmetic alone, on registers at the processor's peak, {peak:.2f} ×"
        return f"{words}."

    return explain


def peer(words: str, name: str, limit: float) -> Bar:
    """The target against another package."""
    return Bar(words=words, limit=limit, result=MAIN, values=of_peer(name), because=beside(name, limit))


def shape(words: str, name: str) -> Bar:
    """The target against the matmuls at another shape."""
    return Bar(
        words=f"the four bare matmuls, {words}", limit=1.10, result=f"linear_peers_{name}",
        values=of_matmuls(EAGER, COMPILED), because=lambda _: ON_TOP,
    )  # fmt: skip


def peers_of(figures: Figures) -> list[str]:
    """The peers that were timed, in order of their times."""
    results = figures["results"]
    rivals = [name for name in results if name not in (*BARE, EAGER, COMPILED)]
    return sorted(rivals, key=lambda name: results[name]["of_matmuls"])


def of_fastest_peer(figures: Figures) -> Values:
    """The ratio of kleash to the fastest peer."""
    ratios = of_peer(peers_of(figures)[0])(figures)
    return {name: ratios[name] for name in (COMPILED,) if name in ratios}


def behind_fastest(figures: Figures) -> str:
    """The reason for a missed target against the fastest peer: both ratios to the matmuls."""
    fastest, results = peers_of(figures)[0], figures["results"]
    return (
        f"The fastest peer is {wording(figures)[fastest]} at {results[fastest]['of_matmuls']:.2f} × the four matmuls; "
        f"kleash takes {results[COMPILED]['of_matmuls']:.2f} ×."
    )


def fastest_peer(name: str, tokens: str, words: str) -> Bar:
    """The target against the fastest peer at one shape."""
    return Bar(
        words=f"the fastest peer, {tokens} tokens, vocabulary {words}", limit=1.03, result=f"linear_peers_{name}",
        values=of_fastest_peer, because=behind_fastest,
    )  # fmt: skip


def near(*columns: str) -> Callable[[Figures], Values]:
    """The minimum of these columns in the row with the smallest KL."""

    def values(figures: Figures) -> Values:
        nearest = min(row["nats"] for row in figures["rows"])
        rows = [row for row in figures["rows"] if row["nats"] == nearest and row["name"] == EAGER]
        return {EAGER: min(rows[0][column] for column in columns)} if rows else {}

    return values


def gpu(name: str | None = None) -> Callable[[Figures], Values]:
    """On a GPU: the rate, or the ratio of seconds to a peer."""

    def values(figures: Figures) -> Values:
        rows = {row["name"]: row for row in figures["results"] if row["what"] == "gradient"}
        if name is None:
            return {EAGER: rows["triton"]["rate"]}
        return {EAGER: rows["triton"]["seconds"] / rows[name]["seconds"]} if name in rows else {}

    return values


ON_TOP = (
    "Beside the matmuls there are the elementwise work, gradients in newly allocated memory, and chunks whose size "
    "follows from the memory budget."
)
UNFUSED = "Without the compiled library, each elementwise operation is one pass over a block of rows."
BARS = (
    Bar(
        words="the four bare matmuls, compiled core", limit=1.06, result=MAIN, values=of_matmuls(COMPILED),
        because=lambda _: ON_TOP,
    ),
    Bar(
        words="the four bare matmuls, eager", limit=1.18, result=MAIN, values=of_matmuls(EAGER),
        because=lambda _: UNFUSED,
    ),
    Bar(
        words="kleash's k3, gradient formed in the forward pass in both", limit=1.03, result=TRAINING,
        values=of_training(eager=("exact eager", "k3 eager"), compiled=("exact compiled", "k3 compiled")),
        because=lambda _: "k3 reads one number of q's logits for each token; the exact KL reads all of them again.",
    ),
    Bar(
        words="kleash's k3, both recomputed", limit=1.22, result=TRAINING,
        values=of_training(eager=("exact recomputed", "k3 recomputed")),
        because=lambda _: "Six matmuls instead of five are 1.20 × by themselves; "
        "in addition, both models' logits pass through the elementwise work twice.",
    ),
    peer("naive exact", "naive exact", 0.75),
    peer("naive k3", "naive k3", 0.98),
    peer("TRL `chunked_divergence`", "trl", 0.40),
    peer("Liger chunked JSD, beta = 1", "liger", 0.70),
    peer("torchtune-style chunks", "torchtune", 0.50),
    peer("checkpointing per chunk", "checkpointing", 0.50),
    Bar(
        words="bfloat16 inputs: kleash's float32 run on the same inputs", limit=0.90, result=TRAINING,
        values=of_training(
            eager=("exact bf16", "exact eager"), compiled=("exact bf16, compiled", "exact compiled")
        ),
        because=lambda _: "This CPU has no matmul from bfloat16 to float32: heads are converted to float32 in tiles.",
    ),
    shape("hidden size 4096", "h4096"),
    shape("1024 tokens", "n1k"),
    shape("8192 tokens", "n8k"),
    fastest_peer("n1k", "1 024", "32 768"),
    fastest_peer("v128k", "1 024", "128 256"),
    fastest_peer("v152k", "1 024", "151 936"),
    fastest_peer("v262k", "1 024", "262 144"),
    fastest_peer("n4k", "4 096", "32 768"),
    fastest_peer("n4k_v128k", "4 096", "128 256"),
    fastest_peer("n4k_v152k", "4 096", "151 936"),
    fastest_peer("n4k_v262k", "4 096", "262 144"),
    Bar(
        words="peak memory beyond inputs and gradients: 128 MiB", limit=128 * 2**20 / 1e6,
        result="linear_peaks_main", form="{:.0f} MB",
        values=lambda figures: {
            row["name"]: row["extra_megabytes"] for row in figures["rows"] if row["name"] in (EAGER, COMPILED)
        },
        because=lambda _: "In addition to the budget, which holds the logits, there are a few rows for the elementwise "
        "work and the matrix library's own memory.",
    ),
    Bar(
        words="relative error of the mean, bfloat16 inputs, at the smallest KL", limit=1e-3,
        result="linear_accuracy", values=near("relative_error"), form="{:.0e}", because=lambda _: "",
    ),
    Bar(
        words="cosine of the gradient with the float64 gradient, at the smallest KL", limit=0.999, least=True,
        result="linear_accuracy", values=near("cosine_hidden", "cosine_weight"), form="{:.4f}", because=lambda _: "",
    ),
    Bar(
        words="GPU, bfloat16: share of the bare matmuls' rate", limit=0.80, least=True, result="linear_gpu",
        values=gpu(), form="{:.2f}", because=lambda _: "",
    ),
    Bar(
        words="GPU, bfloat16: Liger `fused_linear_jsd`", limit=0.50, result="linear_gpu",
        values=gpu("liger fused_linear_jsd"), because=lambda _: "",
    ),
    Bar(
        words="GPU, bfloat16: TRL `chunked_divergence`", limit=0.70, result="linear_gpu",
        values=gpu("trl chunked_divergence"), because=lambda _: "",
    ),
)  # fmt: skip


def table(results: Mapping[str, Figures]) -> list[str]:
    """A row for each target, and a sentence for each missed target."""
    rows = ["| compared with | target | eager | compiled | |", "|---|---|---|---|---|"]
    missed: list[str] = []
    for bar in BARS:
        values = bar.values(results[bar.result]) if bar.result in results else {}
        cells = [shown(bar, values[name]) if name in values else "" for name in (EAGER, COMPILED)]
        verdicts = {name: bar.reached(value) for name, value in values.items()}
        rows.append(f"| {bar.words} | {'≥' if bar.least else '≤'} {written(bar, bar.limit)} | "
                    f"{' | '.join(cells)} | {verdict(verdicts)} |")  # fmt: skip
        if not all(verdicts.values()):
            how = {EAGER: "eager", COMPILED: "compiled"}
            short = " and ".join(
                f"{shown(bar, values[n])} {how[n]}" for n, good in verdicts.items() if not good
            )
            sentence = f"{short} instead of {written(bar, bar.limit)}. {bar.because(results[bar.result])}"
            missed.append(f"- **{bar.words}**: {sentence}".strip())
    return [*rows, "", *(["Missed targets, and the reasons:", "", *missed, ""] if missed else [])]


def shown(bar: Bar, value: float) -> str:
    """The value as text, with one more digit if rounding would hide that the target is missed."""
    text, limit = written(bar, value), written(bar, bar.limit)
    return f"{value:.3f} ×" if text == limit and not bar.reached(value) and "×" in text else text


def verdict(reached: Mapping[str, bool]) -> str:
    """The result in words: reached, missed, reached by one of both, or not measured yet."""
    if not reached:
        return "not measured yet"
    if all(reached.values()):
        return "reached"
    good = [name for name, yes in reached.items() if yes]
    return "**missed**" if not good else "reached " + ("compiled" if good == [COMPILED] else "eager")


def written(bar: Bar, value: float) -> str:
    """A number in the format of the target."""
    return bar.form.format(value).replace("e-0", "e-")
