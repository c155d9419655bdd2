"""llama.cpp's statistics of a quantised model against base logits, with its formulas and in its layout.

Source: llama.cpp, ``tools/perplexity/perplexity.cpp``: ``log_softmax`` with base log-probabilities, ``kl_divergence``.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kleash.errors import OptionError
from kleash.store import Measurement, RunFolder

LEAST_VALUES = 100
"""llama.cpp prints no statistics of fewer tokens."""
STORED_COLUMNS = ("logp_policy", "logp_reference", "top1_policy", "top1_reference")
"""Columns of ``tokens/`` that the statistics are made of, beside the KL."""
KLD_LEVELS = (0.999, 0.99, 0.95, 0.9, None, 0.1, 0.05, 0.01, 0.001)
DP_LEVELS = (0.999, 0.99, 0.95, 0.9, 0.75, None, 0.25, 0.1, 0.05, 0.01, 0.001)
"""Quantiles in the order in which they are printed; None is the median."""


def llama_cpp_text(measurement: Measurement) -> str:
    """llama.cpp's statistics of a measurement, from the files of its run; the base is the reference.

    The KL of each token is llama.cpp's where the reference is a file of base logits; otherwise it is exact, without the
    rounding and cut-off of llama.cpp.

    Raises:
        OptionError: if fewer than 100 tokens were scored, or one model is behind a server.
        RunFolderError: if a file is missing or damaged.
    """
    run = RunFolder(Path(measurement)).require_shards(measurement.counts.shards)
    kld = "llama_cpp_kld" if "llama_cpp_kld" in run.token_columns() else "kl_reference_policy"
    parts = list(run.parts("tokens", [*STORED_COLUMNS, kld]))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if np.isnan(columns[kld]).any():
        raise OptionError(
            f"--format llama.cpp needs KL(reference ‖ policy) of every token, which {run.root} does not have: one "
            "model is behind a server; its numbers are printed by --format csv"
        )
    nll, nll_base = -columns["logp_policy"], -columns["logp_reference"]
    if len(nll) < LEAST_VALUES:
        raise OptionError(
            f"--format llama.cpp takes {LEAST_VALUES} tokens or more, and {run.root} has {len(nll)}; its numbers are "
            "printed by --format csv"
        )
    same_top = columns["top1_policy"] == columns["top1_reference"]
    return format_llama_cpp(nll, nll_base, columns[kld], np.exp(-nll) - np.exp(-nll_base), same_top) + "\n"


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def format_llama_cpp(
    nll: np.ndarray, nll_base: np.ndarray, kld: np.ndarray, dp: np.ndarray, same_top: np.ndarray
) -> str:
    """The statistics as llama-perplexity prints them, line by line.

    What float32 or float64 cannot hold is inf or nan, as there.

    Args:
        nll: negative log-likelihood of the quantised model, of each token as all others, in float32 where llama.cpp is.
        nll_base: the same of the base.
        kld: KL of the base from the quantised model, Σ p_base (log p_base - log p) over tokens of log p_base above -16.
        dp: probability of the token, quantised minus base.
        same_top: whether both have the same likeliest token.
    """
    mean, error = _mean(kld.astype(np.float64))
    mean_dp, error_dp = _mean(dp)
    square, square_error = _mean((dp**2).astype(np.float64))
    rms = math.sqrt(square)
    rms_error = 0.5 / rms * square_error if rms else math.nan
    same = float(same_top.mean())
    same_error = math.sqrt(same * (1 - same) / (len(kld) - 1))
    lines = [
        *(*_perplexity_lines(nll, nll_base), "", "====== KL divergence statistics ======"),
        f"Mean    KLD: {mean:10.6f} ± {error:10.6f}",
        *_quantile_lines(kld, KLD_LEVELS, lambda kld: f"KLD: {kld:10.6f}"),
        *("", "====== Token probability statistics ======"),
        f"Mean    Δp: {100 * mean_dp:6.3f} ± {100 * error_dp:5.3f} %",
        *_quantile_lines(dp, DP_LEVELS, lambda dp: f"Δp: {100 * dp:6.3f}%"),
        f"RMS Δp    : {100 * rms:6.3f} ± {100 * rms_error:5.3f} %",
        f"Same top p: {100 * same:6.3f} ± {100 * same_error:5.3f} %",
    ]
    return "\n".join(lines)


def _perplexity_lines(nll_q: np.ndarray, nll_base: np.ndarray) -> list[str]:
    """The block of perplexities."""
    (nll, nll_error), (base, base_error) = _mean(nll_q), _mean(nll_base)
    count = len(nll_q)
    products = (nll_q * nll_base).astype(np.float64)
    covariance = np.float64((products.mean() - nll * base) / (count - 1))
    correlation = covariance / (np.float64(nll_error) * base_error)
    ratio_error = np.sqrt(np.maximum(0.0, nll_error**2 + base_error**2 - 2 * covariance))
    q, p, ratio = np.exp(np.array([nll, base, nll - base]))
    q_error, p_error = q * nll_error, p * base_error
    difference_error = np.sqrt(np.maximum(0.0, q_error**2 + p_error**2 - 2 * q * p * covariance))
    return [
        "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {q:10.6f} ± {q_error:10.6f}",
        f"Mean PPL(base)                : {p:10.6f} ± {p_error:10.6f}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * correlation:6.2f}%",
        f"Mean ln(PPL(Q)/PPL(base))     : {nll - base:10.6f} ± {ratio_error:10.6f}",
        f"Mean PPL(Q)/PPL(base)         : {ratio:10.6f} ± {ratio * ratio_error:10.6f}",
        f"Mean PPL(Q)-PPL(base)         : {q - p:10.6f} ± {difference_error:10.6f}",
    ]


def _mean(values: np.ndarray) -> tuple[float, float]:
    """llama.cpp's mean and its error, which takes tokens for independent; squares keep the dtype of the values."""
    mean = float(values.astype(np.float64).mean())
    variance = float((values**2).astype(np.float64).mean()) - mean * mean
    return mean, math.sqrt(variance / (len(values) - 1)) if variance > 0 else 0.0


def _quantile_lines(
    values: np.ndarray, levels: Sequence[float | None], written: Callable[[float], str]
) -> list[str]:
    """The lines of the largest value, the quantiles and the smallest value, each as ``written``."""
    ordered = np.sort(values.astype(np.float32))
    quantiles = {
        "Median " if level is None else f"{100 * level:4.1f}%  ": _quantile(ordered, level)
        for level in levels
    }
    lines = {"Maximum": float(ordered[-1]), **quantiles, "Minimum": float(ordered[0])}
    return [f"{name} {written(value)}" for name, value in lines.items()]


def _quantile(ordered: np.ndarray, level: float | None) -> float:
    """llama.cpp's quantile of ascending values, in float32 as there; the median without a level."""
    if level is None:
        middle = len(ordered) // 2
        return float(ordered[middle] if len(ordered) % 2 else (ordered[middle] + ordered[middle - 1]) / 2)
    place = np.float32(level) * np.float32(len(ordered) - 1)
    index = int(place)
    part = place - np.float32(index)
    upper = ordered[min(index + 1, len(ordered) - 1)]
    return float((np.float32(1) - part) * ordered[index] + part * upper)
