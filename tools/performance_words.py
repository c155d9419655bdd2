"""The sections of docs/performance.md; all numbers are from the figures of the benchmarks."""

from collections.abc import Callable, Sequence

from performance_bars import COMPILED, EAGER, Figures, wording
from performance_frame import COMMANDS, SHAPES, Results, Row, absent, markdown_table, paragraph, ratio, size
from svg_charts import tick


def peers(figures: Figures) -> list[str]:
    """A row for each method: seconds, ratio to the matmuls, and ratios of kleash to it."""
    words = wording(figures)
    keys = ("of_matmuls", f"{EAGER} of it", f"{COMPILED} of it")
    rows = [
        [words[name], f"{row['seconds']:.2f}", *(ratio(row, key) for key in keys)]
        for name, row in figures["results"].items()
    ]
    return markdown_table(
        ["", "seconds", "× the four matmuls", "kleash eager ÷ this", "kleash compiled ÷ this"], rows
    )


def time(results: Results) -> list[str]:
    """The section on the main comparison."""
    if "linear_peers_main" not in results:
        return ["## Time", "", *absent("linear_peers_main")]
    figures = results["linear_peers_main"]
    words = """{size}, {dtype}, median of {rounds} rounds. k3 (one sampled token for each position) and cross-entropy
        are other quantities; they are listed for scale."""
    picture = "![Seconds of each way as a multiple of the four matmuls](images/performance_time.svg)"
    return ["## Time", "", picture, "", *paragraph(words, size=size(figures), **figures), *peers(figures)]


def shapes(results: Results) -> list[str]:
    """The section on other shapes, each as a multiple of the four matmuls at that shape."""
    available = [results[name] for name in SHAPES if name in results]
    missing = absent(*(name for name in SHAPES if name not in results))
    if not available:
        return ["## Other shapes", "", *missing]
    words = {
        way: text
        for figures in available
        for way, text in wording(figures).items()
        if way in figures["results"]
    }
    del words["matmuls"]
    rows = [
        [
            *(str(figures[key]) for key in ("tokens", "hidden", "vocabulary")),
            *(ratio(figures["results"].get(way, {}), "of_matmuls") for way in words),
            str(figures["rounds"]),
        ]
        for figures in available
    ]
    heads = ["tokens", "hidden", "vocabulary", *words.values(), "rounds"]
    head = paragraph("Time as a multiple of the four matmuls of the same shape, float32.")
    return ["## Other shapes", "", *head, *markdown_table(heads, rows), *not_in_rounds(available), *missing]


def not_in_rounds(shapes: Sequence[Row]) -> list[str]:
    """The methods that were timed in one call only, and those that are left out."""
    lines: list[str] = []
    for figures in shapes:
        seconds = [
            f"{text} {figures['checks'][way]['seconds_of_first_call']:.1f} s"
            for way, text in figures.get("once", {}).items()
        ]
        sentences: list[str] = []
        if seconds:
            ours = figures["results"][COMPILED]["seconds"]
            sentences.append(f"First calls: {', '.join(seconds)}; `linear_kl_loss` {ours:.1f} s (median).")
        if figures.get("left_out"):
            sentences.append(figures["left_out"])
        if sentences:
            lines.append(
                f"- {figures['tokens']} tokens, vocabulary {figures['vocabulary']}: {' '.join(sentences)}"
            )
    if not lines:
        return []
    return [*paragraph("Not timed in rounds:"), *lines, ""]


def narrow(results: Results) -> list[str]:
    """The section on bfloat16 inputs."""
    name = "linear_peers_main_bfloat16"
    if name not in results:
        return ["## bfloat16 inputs", "", *absent(name)]
    figures = results[name]
    words = """{size}, median of {rounds} rounds; the four matmuls are in bfloat16, too. Some implementations round
        the logits to bfloat16; [accuracy](#accuracy) has the errors."""
    return ["## bfloat16 inputs", "", *paragraph(words, size=size(figures), **figures), *peers(figures)]


def values(results: Results) -> list[str]:
    """The section on values without a gradient."""
    title = ["## Values alone", ""]
    if "linear_speed" not in results:
        return [*title, *absent("linear_speed")]
    figures = results["linear_speed"]
    words = """{size}, float32, median of {rounds} rounds, without a gradient: compared with the two matmuls that any
        log-probability needs, and with a pass of kleash's that computes only k3, in the same mode (eager or compiled).
        `kl` is `linear_kl`, `statistics` is `token_statistics`."""
    rows = [
        [name, f"{row['of the matmuls']:.2f}", f"{row['of k3']:.2f}"]
        for name, row in figures["ratios"].items()
    ]
    return [
        *title,
        *paragraph(words, size=size(figures), **figures),
        *markdown_table(["", "× the two matmuls", "× k3"], rows),
    ]


def engine(results: Results) -> list[str]:
    """The section on the exact KL compared with k3 in the same engine."""
    title = ["## Compared with k3 in kleash", ""]
    if "linear_training" not in results:
        return [*title, *absent("linear_training")]
    figures = results["linear_training"]
    words = """{size}, float32 unless stated otherwise. *At once* computes the gradient in the forward pass
        (`linear_kl_loss`); *recomputed* computes the values first, and most logits a second time in the backward pass
        (`linear_kl`). k3 is the same loop with the one-sample estimate, in the same mode: eager or compiled, at once or
        recomputed. The k3 beside “recomputed, compiled” is eager."""
    rows = [
        [
            ENGINE[name],
            *("" if (to := beside(of, column)) is None else f"{to:.2f}" for column in BESIDE.values()),
        ]
        for name, of in figures["ratios"].items()
        if name in ENGINE
    ]
    return [*title, *paragraph(words, size=size(figures)), *markdown_table(["", *BESIDE], rows)]


ENGINE = {
    "exact eager": "exact, at once, eager",
    "exact compiled": "exact, at once, compiled",
    "exact recomputed": "exact, recomputed, eager",
    "exact recomputed, compiled": "exact, recomputed, compiled",
    "exact bf16": "exact, at once, eager, from bfloat16",
    "exact bf16, compiled": "exact, at once, compiled, from bfloat16",
}
BESIDE = {
    "× the four matmuls": ("matmuls",),
    "× k3": ("k3 eager", "k3 compiled", "k3 recomputed"),
    "× naive exact": ("naive exact",),
    "× naive k3": ("naive k3",),
    "× float32": ("exact eager", "exact compiled"),
}


def beside(of: Row, rivals: Sequence[str]) -> float | None:
    """The ratio to the first of the rivals that was measured."""
    return next((of[rival] for rival in rivals if rival in of), None)


def memory(results: Results) -> list[str]:
    """The section on memory: the main shape, the curves, and values at a large size."""
    lines = ["## Memory", ""]
    if "linear_peaks_main" in results:
        figures = results["linear_peaks_main"]
        words = """{size}, float32: peak resident memory during a call, without what the process held before and without
            the gradients; each implementation runs in a separate process. kleash's buffers have a budget of
            {budget_megabytes:.0f} MB (`LinearOptions.buffer_bytes`)."""
        lines += paragraph(words, size=size(figures["rows"][0]), **figures)
        rows = [[figures["words"][row["name"]], f"{row['extra_megabytes']:.0f}"] for row in figures["rows"]]
        lines += markdown_table(["", "MB"], rows)
    for what, other in (("tokens", "vocabulary"), ("vocabulary", "tokens")):
        if f"linear_peaks_{what}" in results:
            first = results[f"linear_peaks_{what}"]["rows"][0]
            lines += [f"![Peak memory over {what}](images/performance_memory_{what}.svg)", ""]
            lines += paragraph(f"Hidden size {first['hidden']}, {other} {first[other]}.")
    if "linear_memory" in results:
        figures = results["linear_memory"]
        words = """The value alone, `linear_kl`, at {size}: {extra:.0f} MB beyond its inputs, including the compiler.
            The logits of each model would be {logits_of_each_model_megabytes:.0f} MB."""
        lines += paragraph(words, size=size(figures), extra=figures["kl"]["extra_megabytes"], **figures)
    names = [name for name in COMMANDS if name.startswith(("linear_peaks", "linear_memory"))]
    return lines + absent(*(name for name in names if name not in results))


def accuracy(results: Results) -> list[str]:
    """The section on errors of value and gradient."""
    if "linear_accuracy" not in results:
        return ["## Accuracy", "", *absent("linear_accuracy")]
    figures = results["linear_accuracy"]
    words = """Hidden states and heads in bfloat16, {size}. The true values are computed in float64 from the same
        rounded
        inputs. In a mean over tokens, errors of both signs cancel; the first table therefore has the median relative
        error of a single token's KL, and the share of tokens with a negative KL if there are any."""
    picture = "![Relative error of one token's KL](images/performance_accuracy.svg)"
    lines = ["## Accuracy", "", picture, "", *paragraph(words, size=size(figures))]
    tables: dict[str, Callable[[Row], str]] = {
        "error of one token's KL": token_error,
        "error of the mean KL": lambda row: error(row["relative_error"]),
        "cosine of the gradient with the float64 gradient": gradient_cosine,
    }
    distances = [f"{tick(nats)} nats" for nats in sorted({row["nats"] for row in figures["rows"]})]
    for title, cell in tables.items():
        rows = [
            [text, *(cell(row) for row in figures["rows"] if row["name"] == name)]
            for name, text in figures["words"].items()
        ]
        lines += markdown_table([title, *distances], rows)
    return [
        *lines,
        *paragraph("The cosine is the smaller one of the gradients for the hidden states and for the head."),
    ]


def token_error(row: Row) -> str:
    """The median error of a token, and the share of negative values."""
    negative = f" ({row['negative_share']:.0%} negative)" if row["negative_share"] else ""
    return f"{error(row['median_error_of_a_token'])}{negative}"


def error(relative: float) -> str:
    """A relative error, in per cent from 0.1 % on."""
    if relative < 1e-3:
        return f"{relative:.1e}".replace("e-0", "e-")
    return f"{100 * relative:.2g} %" if relative < 1 else f"{100 * relative:.0f} %"


def gradient_cosine(row: Row) -> str:
    """The smaller of the two cosines."""
    return f"{min(row['cosine_hidden'], row['cosine_weight']):.4f}"


def step(results: Results) -> list[str]:
    """The section on the share of a training step."""
    title = ["## A whole training step", ""]
    if "linear_step" not in results:
        return [*title, *absent("linear_step")]
    figures = results["linear_step"]
    words = """A Llama with {million:.0f} million parameters without embedding and head; {sequences} responses of
        {length}
        tokens, hidden size {hidden}, vocabulary {vocabulary}, float32, median of {rounds} rounds. A step is both
        models' forward pass, a clipped policy loss with 0.05 KL, the backward pass, and AdamW. “Loss” is everything
        between the hidden states and their gradient."""
    names = {
        "exact": "exact KL, `linear_objective`", "k3": "k3, `linear_objective`",
        "naive exact": "exact KL, naive", "naive k3": "k3, naive", "no KL": "no KL and no reference, naive",
    }  # fmt: skip
    rows = [
        [names[name], f"{row['step']:.2f}", f"{row['loss']:.2f}", f"{row['loss_share']:.0%}"]
        for name, row in figures["results"].items()
    ]
    counted = "; ".join(
        f"{name}: the head's four matmuls are {row['head_share']:.1%} of a step's multiplications, one of them "
        f"{row['one_matmul_share']:.1%}"
        for name, row in figures["counted"].items()
    )
    tail = """The head's share is large because the model is small. For larger models it is counted, not measured, with
        8 operations for each token and parameter of the transformer (policy forward and backward, reference forward):
        {counted}. A trainer that caches the reference's log-probabilities pays one more matmul for the exact KL; it
        caches the reference's [hidden states](cache.md) instead."""
    table = markdown_table(["", "step, s", "loss, s", "share of the loss"], rows)
    lines = paragraph(words, million=figures["body_parameters"] / 1e6, **figures)
    return [*title, *lines, *table, *paragraph(tail, counted=counted)]


def gpu(results: Results) -> list[str]:
    """The section on GPUs, if one was measured."""
    available = [figures for name, figures in results.items() if name.startswith("linear_gpu")]
    lines = ["## GPU", ""]
    if not available:
        return [
            *lines,
            *paragraph("Not yet measured on a GPU. `python benchmarks/linear_gpu.py` measures it."),
        ]
    for figures in available:
        rows = [
            [
                row["name"], row["what"], f"{row['seconds'] * 1e3:.1f}", f"{row['rate']:.2f}",
                f"{row['teraflops']:.0f}", f"{row['peak_mib']:.0f}",
            ]
            for row in figures["results"]
        ]  # fmt: skip
        lines += paragraph("{size}, bfloat16, median of {rounds} rounds.", size=size(figures), **figures)
        lines += markdown_table(
            ["", "", "ms", "share of the bare matmuls' rate", "TFLOP/s", "peak, MiB"], rows
        )
    return lines
