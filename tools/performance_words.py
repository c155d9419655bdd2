"""The sections of docs/performance.md, from the figures of the benchmarks; nothing here knows a number."""

from collections.abc import Callable, Sequence

from performance_bars import COMPILED, EAGER, Figures, wording
from performance_frame import COMMANDS, SHAPES, Results, Row, absent, grid, ratio, said, size
from svg_charts import tick


def peers(found: Figures) -> list[str]:
    """A row for every way: seconds, to the matmuls, and ours to it."""
    words = wording(found)
    keys = ("of_matmuls", f"{EAGER} of it", f"{COMPILED} of it")
    rows = [
        [words[name], f"{row['seconds']:.2f}", *(ratio(row, key) for key in keys)]
        for name, row in found["results"].items()
    ]
    return grid(["", "seconds", "× the four matmuls", "kleash eager ÷ this", "kleash compiled ÷ this"], rows)


def time(results: Results) -> list[str]:
    """The main comparison."""
    if "linear_peers_main" not in results:
        return ["## Time", "", *absent("linear_peers_main")]
    found = results["linear_peers_main"]
    words = """{size}, {dtype}, median of {rounds} rounds. k3 (one sampled token for each position) and cross-entropy
        are other quantities; they are listed for scale."""
    picture = "![Seconds of each way as a multiple of the four matmuls](images/performance_time.svg)"
    return ["## Time", "", picture, "", *said(words, size=size(found), **found), *peers(found)]


def shapes(results: Results) -> list[str]:
    """Other sizes, each as a multiple of its own four matmuls."""
    there = [results[name] for name in SHAPES if name in results]
    missing = absent(*(name for name in SHAPES if name not in results))
    if not there:
        return ["## Other shapes", "", *missing]
    words = {way: text for found in there for way, text in wording(found).items() if way in found["results"]}
    del words["matmuls"]
    rows = [
        [
            *(str(found[key]) for key in ("tokens", "hidden", "vocabulary")),
            *(ratio(found["results"].get(way, {}), "of_matmuls") for way in words),
            str(found["rounds"]),
        ]
        for found in there
    ]
    heads = ["tokens", "hidden", "vocabulary", *words.values(), "rounds"]
    head = said("Time as a multiple of the four matmuls of the same shape, float32.")
    return ["## Other shapes", "", *head, *grid(heads, rows), *not_in_rounds(there), *missing]


def not_in_rounds(shapes: Sequence[Row]) -> list[str]:
    """The peers that were timed in one call only, and those that do not run."""
    lines: list[str] = []
    for found in shapes:
        seconds = [
            f"{text} {found['checks'][way]['seconds_of_first_call']:.1f} s"
            for way, text in found.get("once", {}).items()
        ]
        sentences: list[str] = []
        if seconds:
            ours = found["results"][COMPILED]["seconds"]
            sentences.append(f"First calls: {', '.join(seconds)}; `linear_kl_loss` {ours:.1f} s (median).")
        if found.get("left_out"):
            sentences.append(found["left_out"])
        if sentences:
            lines.append(
                f"- {found['tokens']} tokens, vocabulary {found['vocabulary']}: {' '.join(sentences)}"
            )
    if not lines:
        return []
    return [*said("Not timed in rounds:"), *lines, ""]


def narrow(results: Results) -> list[str]:
    """From bfloat16 inputs."""
    name = "linear_peers_main_bfloat16"
    if name not in results:
        return ["## bfloat16 inputs", "", *absent(name)]
    found = results[name]
    words = """{size}, median of {rounds} rounds; the four matmuls are in bfloat16, too. Some implementations round
        the logits to bfloat16; [accuracy](#accuracy) has the errors."""
    return ["## bfloat16 inputs", "", *said(words, size=size(found), **found), *peers(found)]


def values(results: Results) -> list[str]:
    """Without a gradient."""
    title = ["## Values alone", ""]
    if "linear_speed" not in results:
        return [*title, *absent("linear_speed")]
    found = results["linear_speed"]
    words = """{size}, float32, median of {rounds} rounds, without a gradient: compared with the two matmuls that any
        log-probability needs, and with a pass of kleash's that computes only k3, in the same mode (eager or compiled).
        `kl` is `linear_kl`, `statistics` is `token_statistics`."""
    rows = [
        [name, f"{row['of the matmuls']:.2f}", f"{row['of k3']:.2f}"] for name, row in found["ratios"].items()
    ]
    return [*title, *said(words, size=size(found), **found), *grid(["", "× the two matmuls", "× k3"], rows)]


def engine(results: Results) -> list[str]:
    """Value and gradient beside the engine's own k3, formed at once and recomputed."""
    title = ["## Compared with k3 in kleash", ""]
    if "linear_training" not in results:
        return [*title, *absent("linear_training")]
    found = results["linear_training"]
    words = """{size}, float32 unless stated otherwise. *At once* computes the gradient in the forward pass
        (`linear_kl_loss`); *recomputed* computes the values first, and most logits a second time in the backward pass
        (`linear_kl`). k3 is the same loop with the one-sample estimate, in the same mode: eager or compiled, at once or
        recomputed. The k3 beside “recomputed, compiled” is eager."""
    rows = [
        [
            ENGINE[name],
            *("" if (to := beside(of, column)) is None else f"{to:.2f}" for column in BESIDE.values()),
        ]
        for name, of in found["ratios"].items()
        if name in ENGINE
    ]
    return [*title, *said(words, size=size(found)), *grid(["", *BESIDE], rows)]


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
    """The ratio to whichever of the rivals there is."""
    return next((of[rival] for rival in rivals if rival in of), None)


def memory(results: Results) -> list[str]:
    """The main shape, the curves, and the value alone at a large size."""
    lines = ["## Memory", ""]
    if "linear_peaks_main" in results:
        found = results["linear_peaks_main"]
        words = """{size}, float32: peak resident memory during a call, without what the process held before and without
            the gradients; each implementation runs in a separate process. kleash's buffers have a budget of
            {budget_megabytes:.0f} MB (`LinearOptions.buffer_bytes`)."""
        lines += said(words, size=size(found["rows"][0]), **found)
        rows = [[found["words"][row["name"]], f"{row['extra_megabytes']:.0f}"] for row in found["rows"]]
        lines += grid(["", "MB"], rows)
    for what, other in (("tokens", "vocabulary"), ("vocabulary", "tokens")):
        if f"linear_peaks_{what}" in results:
            first = results[f"linear_peaks_{what}"]["rows"][0]
            lines += [f"![Peak memory over {what}](images/performance_memory_{what}.svg)", ""]
            lines += said(f"Hidden size {first['hidden']}, {other} {first[other]}.")
    if "linear_memory" in results:
        found = results["linear_memory"]
        words = """The value alone, `linear_kl`, at {size}: {extra:.0f} MB beyond its inputs, including the compiler.
            The logits of each model would be {logits_of_each_model_megabytes:.0f} MB."""
        lines += said(words, size=size(found), extra=found["kl"]["extra_megabytes"], **found)
    wanted = [name for name in COMMANDS if name.startswith(("linear_peaks", "linear_memory"))]
    return lines + absent(*(name for name in wanted if name not in results))


def accuracy(results: Results) -> list[str]:
    """Errors of value and gradient, near and far."""
    if "linear_accuracy" not in results:
        return ["## Accuracy", "", *absent("linear_accuracy")]
    found = results["linear_accuracy"]
    words = """Hidden states and heads in bfloat16, {size}. The true values are computed in float64 from the same
        rounded
        inputs. In a mean over tokens, errors of both signs cancel; the first table therefore has the median relative
        error of a single token's KL, and the share of tokens with a negative KL if there are any."""
    picture = "![Relative error of one token's KL](images/performance_accuracy.svg)"
    lines = ["## Accuracy", "", picture, "", *said(words, size=size(found))]
    tables: dict[str, Callable[[Row], str]] = {
        "error of one token's KL": token_error,
        "error of the mean KL": lambda row: error(row["relative_error"]),
        "cosine of the gradient with the float64 gradient": gradient_cosine,
    }
    distances = [f"{tick(nats)} nats" for nats in sorted({row["nats"] for row in found["rows"]})]
    for title, cell in tables.items():
        rows = [
            [text, *(cell(row) for row in found["rows"] if row["name"] == name)]
            for name, text in found["words"].items()
        ]
        lines += grid([title, *distances], rows)
    return [
        *lines,
        *said("The cosine is the smaller one of the gradients for the hidden states and for the head."),
    ]


def token_error(row: Row) -> str:
    """The error, and how many are negative."""
    negative = f" ({row['negative_share']:.0%} negative)" if row["negative_share"] else ""
    return f"{error(row['median_error_of_a_token'])}{negative}"


def error(relative: float) -> str:
    """In per cent where that is readable."""
    if relative < 1e-3:
        return f"{relative:.1e}".replace("e-0", "e-")
    return f"{100 * relative:.2g} %" if relative < 1 else f"{100 * relative:.0f} %"


def gradient_cosine(row: Row) -> str:
    """The worse of the two."""
    return f"{min(row['cosine_hidden'], row['cosine_weight']):.4f}"


def step(results: Results) -> list[str]:
    """The share of a whole training step."""
    title = ["## A whole training step", ""]
    if "linear_step" not in results:
        return [*title, *absent("linear_step")]
    found = results["linear_step"]
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
        for name, row in found["results"].items()
    ]
    counted = "; ".join(
        f"{name}: the head's four matmuls are {row['head_share']:.1%} of a step's multiplications, one of them "
        f"{row['one_matmul_share']:.1%}"
        for name, row in found["counted"].items()
    )
    tail = """The head's share is large because the model is small. For larger models it is counted, not measured, with
        8 operations for each token and parameter of the transformer (policy forward and backward, reference forward):
        {counted}. A trainer that caches the reference's log-probabilities pays one more matmul for the exact KL; it
        caches the reference's [hidden states](cache.md) instead."""
    table = grid(["", "step, s", "loss, s", "share of the loss"], rows)
    lines = said(words, million=found["body_parameters"] / 1e6, **found)
    return [*title, *lines, *table, *said(tail, counted=counted)]


def skipping(results: Results) -> list[str]:
    """What `skip_below` saves and costs."""
    title = ["## Skipping small gradient entries: `skip_below`", ""]
    if "linear_skipping" not in results:
        return [*title, *absent("linear_skipping")]
    found = results["linear_skipping"]
    words = """`LinearOptions(skip_below=…)`, off by default; {size}, float32. More entries are skipped if the
        distributions are sharper and the bound is larger. Finding the entries takes time, and a product over gathered
        vocabulary entries is slower than one dense product of the same size. Entropy is the median of p's. Errors
        are those of the gradients for the hidden states and the head, relative to the gradients without skipping."""
    rows = [
        [
            f"{each['median_entropy_nats']:.2g}", below, f"{row['multiplied']:.0%}", f"{row['time']:.2f}",
            f"{error(row['error_in_hidden'])}, {error(row['error_in_weight'])}",
        ]
        for key, each in found.items() if key.startswith("spread ")
        for below, row in each.items() if isinstance(row, dict) and "multiplied" in row
    ]  # fmt: skip
    heads = ["entropy, nats", "`skip_below`", "entries multiplied", "× the time", "errors"]
    return [*title, *said(words, size=size(found)), *grid(heads, rows)]


def gpu(results: Results) -> list[str]:
    """On a GPU, if there was one."""
    there = [found for name, found in results.items() if name.startswith("linear_gpu")]
    lines = ["## GPU", ""]
    if not there:
        return [
            *lines,
            *said("Not yet measured on a GPU. `python benchmarks/linear_gpu.py` measures it."),
        ]
    for found in there:
        rows = [
            [
                row["name"], row["what"], f"{row['seconds'] * 1e3:.1f}", f"{row['rate']:.2f}",
                f"{row['teraflops']:.0f}", f"{row['peak_mib']:.0f}",
            ]
            for row in found["results"]
        ]  # fmt: skip
        lines += said("{size}, bfloat16, median of {rounds} rounds.", size=size(found), **found)
        lines += grid(["", "", "ms", "share of the bare matmuls' rate", "TFLOP/s", "peak, MiB"], rows)
    return lines
