"""The functions of the baseline: every public one that computes numbers, on fixed inputs.

All names of the package stand at the top: where one is renamed, ``new as old`` in the import is the only change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kleash import (
    DIVERGENCES,
    ESTIMATORS,
    alpha_divergence,
    chi_squared,
    clustered_mean,
    cross_entropy,
    entropy,
    future_kl_loss,
    hellinger,
    importance_weights,
    jeffreys,
    jensen_shannon,
    kl,
    kl_bounds,
    kl_from_probs,
    kl_gaussian,
    kl_loss,
    renyi,
    sampled_kl,
    shape_rewards,
    skew_kl,
    total_variation,
)
from kleash.divergences import divergence, truncate
from kleash.estimators import bounded_k3
from kleash.leash import (
    BetaSchedule,
    DualBeta,
    FixedBeta,
    PIDBeta,
    TargetSchedule,
    ZieglerBeta,
    best_of_n_kl,
    binary_divergence,
    controlled_kl,
    generalised_advantages,
    geometric_mask,
    group_advantages,
    kl_mask,
    leave_one_out_advantages,
    measured_kl,
    mismatch,
    rewards_to_go,
    sequence_rewards,
    truncated_weights,
    whiten,
    window_weights,
)
from kleash.linear import (
    Head,
    LinearOptions,
    linear_divergence,
    linear_divergence_loss,
    linear_kl,
    linear_kl_loss,
    linear_objective,
    token_statistics,
)
from kleash.losses import (
    AGGREGATIONS,
    KLTerm,
    aggregate,
    controlled_kl_loss,
    distillation_loss,
    divergence_loss,
    dpo_loss,
    free_bits,
    tail_bucket_loss,
    top_k_distillation_loss,
    top_k_from,
    top_k_of,
)
from kleash.masking import masked_mean
from kleash.uncertainty import (
    cluster_labels,
    controlled_total,
    effective_sample_size,
    paired_difference,
    ratio_of_sums,
    running_mean,
    student_t_quantile,
    transformed,
)

CONTROLLERS: Mapping[str, Callable[[], Any]] = {
    "fixed": lambda: FixedBeta(beta=0.2),
    "ziegler": lambda: ZieglerBeta(beta=0.05, target_nats=4.0, horizon=300),
    "ziegler_filtered": lambda: ZieglerBeta(beta=0.05, target_nats=4.0),
    "pid": lambda: PIDBeta(beta=0.05, target_nats=4.0),
    "pid_per_token": lambda: PIDBeta(beta=0.01, target_nats=0.3, per="token", derivative=0.1),
    "dual": lambda: DualBeta(beta=0.05, target_nats=4.0),
    "schedule": lambda: BetaSchedule(begin=0.2, end=0.02, updates=20, shape="cosine"),
    "target_schedule": lambda: TargetSchedule(
        controller=PIDBeta(beta=0.05, target_nats=2.0), begin_nats=2.0, end_nats=9.0, updates=20
    ),
}
LINEAR_OPTIONS: Mapping[str, Any] = {
    "reference": LinearOptions(impl="reference"),
    "chunked": LinearOptions(impl="chunked", compile=False),
    "small_chunks": LinearOptions(impl="chunked", compile=False, buffer_bytes=6000),
}
LARGE_CALL = LinearOptions(impl="chunked")
"""On ``LARGE_SIZES`` these take the library in C, which is not asked for smaller calls."""

LARGE_SIZES = (256, 4099, 16)
"""Tokens, vocabulary and hidden size of a call with more than 2**20 logits."""


def with_gradients(function: Callable[..., Any], *tensors: Tensor, seed: int = 0) -> dict[str, Any]:
    """What a function returns, and the gradients of a fixed weighted sum of it in its inputs."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]
    value = function(*leaves)
    output = value[0] if isinstance(value, tuple) else value
    gradients: dict[str, Tensor | None] = {}
    inputs = [x for x in leaves if x.requires_grad]
    if output.requires_grad:
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(output.shape, generator=generator, dtype=torch.float64).to(output.dtype) + 0.5
        in_inputs = torch.autograd.grad(output, inputs, weights, allow_unused=True)
        gradients = {str(n): g for n, g in enumerate(in_inputs)}
    return {"value": value, "gradient": gradients}


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same normal numbers in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def head_inputs(
    tokens: int, words: int, dim: int, dtype: torch.dtype, distance: float, *, forbidden: bool, shared: bool
) -> tuple[list[Tensor], Callable[..., tuple[Any, Any]], Tensor]:
    """Hidden states and heads at a distance from each other, as leaves; the function from them to two models."""
    hidden_p = normal(1, tokens, dim)
    weight_p, bias_p = 0.6 * normal(2, words, dim), normal(3, words)
    hidden_q = hidden_p + distance * normal(4, tokens, dim)
    weight_q, bias_q = (
        weight_p + 0.1 * distance * normal(5, words, dim),
        bias_p + 0.1 * distance * normal(6, words),
    )
    if forbidden:
        bias_p[::7] = bias_q[::7] = -torch.inf
    leaves = [hidden_p, weight_p, bias_p, hidden_q] + ([] if shared else [weight_q, bias_q])

    def models(*x: Tensor) -> tuple[Any, Any]:
        head_p = Head(x[1], x[2], scale=1.3, softcap=None if forbidden else 9.0)
        head_q = head_p if shared else Head(x[4], x[5], scale=1.3)
        return (x[0], head_p), (x[3], head_q)

    ids = torch.randint(words, (tokens,), generator=torch.Generator().manual_seed(7))
    return [x.to(dtype) for x in leaves], models, torch.where(ids % 7 == 0, ids + 1, ids).clamp_max(words - 1)


def linear_calls(
    leaves: list[Tensor], models: Callable[..., Any], tokens: Tensor, options: Any, names: Sequence[str]
) -> dict[str, Any]:
    """Every linear function on one set of inputs, with gradients."""
    weights = (torch.arange(len(tokens)) % 3).to(leaves[0].dtype) / len(
        tokens
    )  # a third of the tokens is not read

    def objective(terms: Any, rows: slice) -> Tensor:
        ratio = (terms.token_logp - terms.token_logp.detach()).exp()
        return (
            -ratio * weights.to(ratio.dtype)[rows]
            + 0.1 * terms.kl
            - 0.01 * terms.entropy
            + 0.0 * terms.token_logq
        )

    def both(*x: Tensor) -> tuple[Any, Any, Any, Any]:
        (hidden_p, head_p), (hidden_q, head_q) = models(*x)
        return hidden_p, head_p, hidden_q, head_q

    def call_objective(*x: Tensor) -> Any:
        hidden_p, head_p, hidden_q, head_q = both(*x)
        inputs = hidden_p, head_p, tokens, hidden_q, head_q
        return linear_objective(*inputs, objective, temperature=0.8, options=options)

    calls: dict[str, Callable[..., Any]] = {
        "kl": lambda *x: linear_kl(*both(*x), temperature=0.8, options=options),
        "kl_loss": lambda *x: linear_kl_loss(*both(*x), weights=weights, options=options),
        "objective": call_objective,
        "statistics": lambda *x: token_statistics(*both(*x), tokens, options=options)._asdict(),
    }
    for name in names:
        calls[f"divergence_{name}"] = lambda *x, name=name: linear_divergence(
            *both(*x), divergence=name, options=options
        )
        calls[f"divergence_loss_{name}"] = lambda *x, name=name: linear_divergence_loss(
            *both(*x), weights=weights, divergence=name, options=options
        )
    results: dict[str, Any] = {}
    for name, call in calls.items():
        if name == "statistics":
            results[name] = call(*leaves)
        else:
            results[name] = with_gradients(call, *leaves)
    return results


def run_linear() -> Iterator[tuple[str, Any]]:
    """Every linear function: implementation, dtype, distance, forbidden tokens, shared and own head."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    cases = {"far": (3.0, False), "near": (0.02, False), "forbidden": (0.7, True)}
    for implementation, options in LINEAR_OPTIONS.items():
        for dtype_name, dtype in dtypes.items():
            for case, (distance, forbidden) in cases.items():
                for head in ("own", "shared"):
                    inputs = head_inputs(
                        13, 53, 11, dtype, distance, forbidden=forbidden, shared=head == "shared"
                    )
                    names = ["reverse_kl", "jensen_shannon"]
                    if case == "far" and head == "own":
                        names = list(DIVERGENCES)
                    yield (
                        f"{implementation}/{dtype_name}/{case}/{head}",
                        linear_calls(*inputs, options, names),
                    )
    for case, (distance, forbidden) in cases.items():
        for head in ("own", "shared"):
            inputs = head_inputs(
                *LARGE_SIZES, torch.float32, distance, forbidden=forbidden, shared=head == "shared"
            )
            yield f"native/{case}/{head}", linear_calls(*inputs, LARGE_CALL, ["reverse_kl"])


def pair_of_distributions(dtype: torch.dtype, distance: float) -> tuple[Tensor, Tensor]:
    """Two batches of log-probabilities; in the last row each rules out a token of its own."""
    p, q = normal(11, 5, 31), normal(11, 5, 31) + distance * normal(12, 5, 31)
    p[-1, 3] = q[-1, 5] = -torch.inf
    p[-2, 4] = q[-2, 4] = -torch.inf
    return p.log_softmax(-1).to(dtype), q.log_softmax(-1).to(dtype)


def run_dense() -> Iterator[tuple[str, Any]]:
    """The exact divergences between whole distributions."""
    named: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "kl": kl,
        "jeffreys": jeffreys,
        "jensen_shannon": jensen_shannon,
        "jensen_shannon_weighted": lambda p, q: jensen_shannon(p, q, weight=0.2, normalised=True),
        "skew_kl": lambda p, q: skew_kl(p, q, mix=0.3),
        "renyi_half": lambda p, q: renyi(p, q, order=0.5),
        "renyi_two": lambda p, q: renyi(p, q, order=2.0),
        "alpha": lambda p, q: alpha_divergence(p, q, alpha=0.4),
        "chi_squared": chi_squared,
        "total_variation": total_variation,
        "hellinger": hellinger,
        "entropy": lambda p, q: entropy(p),
        "cross_entropy": cross_entropy,
        **{f"table_{name}": lambda p, q, name=name: divergence(name, p, q) for name in DIVERGENCES},
    }
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for distance in (2.0, 0.01):
            p, q = pair_of_distributions(dtype, distance)
            for name, function in named.items():
                yield f"{name}/{dtype}/{distance}", with_gradients(function, p, q)
    p, q = pair_of_distributions(torch.float64, 1.0)
    yield "kl_from_probs", kl_from_probs(p[:3].exp(), q[:3].exp())
    yield "kl_gaussian", with_gradients(kl_gaussian, *(normal(n, 4, 6) for n in range(20, 24)))
    limits: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}]
    for settings in limits:
        yield f"truncate/{settings}", truncate(p[:3], **settings)


def sampled_batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of sampled tokens under three models, [6, 9], and the mask; one log ratio is extreme."""
    q = -normal(31, 6, 9).abs() - 0.3
    p, behaviour = q + 0.4 * normal(32, 6, 9), q + 0.3 * normal(33, 6, 9)
    p, behaviour = p.clamp_max(-1e-3), behaviour.clamp_max(-1e-3)
    p[1, 2] = q[1, 2] - 35
    mask = torch.arange(9) < torch.tensor([9, 7, 4, 1, 8, 6])[:, None]
    mask[0, 3] = False
    return p.to(dtype), q.to(dtype), behaviour.to(dtype), mask


def run_estimators() -> Iterator[tuple[str, Any]]:
    """Estimators, importance weights and bounds from sampled and top-k knowledge."""
    for dtype in (torch.float64, torch.float32):
        p, q, behaviour, mask = sampled_batch(dtype)
        for name in ESTIMATORS:
            yield (
                f"sampled/{name}/{dtype}",
                with_gradients(lambda p, q, name=name: sampled_kl(p, q, name), p, q),
            )
        for level in ("token", "prefix", "sequence"):
            for cap in (None, 1.5):
                yield (
                    f"weights/{level}/{cap}/{dtype}",
                    importance_weights(p, behaviour, mask, level=level, cap=cap),
                )
        bounded = bounded_k3(-2.0)
        yield (
            f"bounded_k3/{dtype}",
            with_gradients(
                lambda p, q, bounded=bounded, mask=mask: kl_loss(p, q, mask, estimator=bounded), p, q
            ),
        )
    whole_p, whole_q = pair_of_distributions(torch.float64, 1.0)
    top = whole_p[:3].topk(6)
    for name in DIVERGENCES:
        yield (
            f"bounds/{name}",
            kl_bounds(top.values, whole_q[:3].gather(-1, top.indices), divergence=name),
        )


def run_losses() -> Iterator[tuple[str, Any]]:
    """Values and gradients of the losses."""
    p, q, behaviour, mask = sampled_batch()
    single = [x.float() for x in (p, q)]
    token_kl = normal(41, 6, 9).abs()
    weights = importance_weights(p, behaviour, mask).values
    for name in ESTIMATORS:
        for label, w in (("plain", None), ("weighted", weights)):
            yield (
                f"kl_loss/{name}/{label}",
                with_gradients(
                    lambda p, q, name=name, w=w: kl_loss(p, q, mask, estimator=name, weights=w), p, q
                ),
            )
        yield (
            f"kl_loss/{name}/float32",
            with_gradients(lambda p, q, name=name: kl_loss(p, q, mask, estimator=name), *single),
        )
    yield (
        "future_kl_loss",
        with_gradients(lambda p: future_kl_loss(p, token_kl, mask, weights=weights), p),
    )
    yield (
        "controlled_kl_loss",
        with_gradients(lambda p: controlled_kl_loss(p, q, token_kl, mask)[0], p),
    )
    for name in DIVERGENCES:
        yield (
            f"divergence_loss/{name}",
            with_gradients(lambda p, name=name: divergence_loss(p, q, mask, divergence=name), p),
        )
    teacher, student = normal(42, 6, 9, 17), normal(43, 6, 9, 17)
    for name in ("kl", "reverse_kl", "jensen_shannon"):
        yield f"distillation/{name}", with_gradients(
            lambda t, s, name=name: distillation_loss(t, s, mask, divergence=name, temperature=2.0),
            teacher, student,
        )  # fmt: skip
    top = teacher.log_softmax(-1).topk(4)
    yield (
        "top_k_distillation",
        with_gradients(lambda s: top_k_distillation_loss(top.indices, top.values, s, mask), student),
    )
    yield (
        "tail_bucket",
        with_gradients(
            lambda s: tail_bucket_loss(
                top_k_of(s.log_softmax(-1), top.indices),
                top_k_from(top.indices, top.values),
                mask,
            ),
            student,
        ),
    )
    for name in ("kl", "reverse_kl"):
        yield f"dpo/{name}", with_gradients(
            lambda c, r, name=name: dpo_loss(c, r, beta=0.1, divergence=name, label_smoothing=0.1),
            normal(44, 8), normal(45, 8),
        )  # fmt: skip
    for how in AGGREGATIONS:
        yield (
            f"aggregate/{how}",
            aggregate(token_kl, mask, how, length=12 if how == "constant" else None),
        )
    yield "free_bits", with_gradients(lambda x: free_bits(x.abs(), 0.3), normal(46, 6, 4))
    terms: list[dict[str, Any]] = [{}, {"ratio": "token"}, {"ratio": "prefix", "cap": 5.0}]
    for settings in terms:
        term = KLTerm(**settings)
        extra = {"behaviour_logp": behaviour} if settings.get("ratio") else {}
        yield (
            f"term/{settings}",
            with_gradients(lambda p, term=term, extra=extra: term.per_token(p, q, mask, **extra), p),
        )
    yield "masked_mean", with_gradients(lambda x: masked_mean(x, mask), token_kl)


def run_leash() -> Iterator[tuple[str, Any]]:
    """Controllers on a fixed course of measurements, rewards, advantages and trust regions."""
    course = (4.0 + 3.0 * np.sin(np.arange(40) / 5) + np.random.default_rng(5).normal(0, 1, 40)).tolist()
    course[7], course[15], course[23], course[31] = float("nan"), float("inf"), 0.0, 1e6
    for name, make in CONTROLLERS.items():
        state, betas = make(), []
        for measured in course:
            state = state.after(measured, sequences=64)
            betas.append(state.beta)
        yield f"controllers/{name}", {"beta": np.array(betas), "end": state.to_dict()}
    p, q, behaviour, mask = sampled_batch()
    token_kl, scores, values = normal(51, 6, 9).abs(), normal(52, 6), normal(53, 6, 9)
    shaped = shape_rewards(scores, token_kl, mask, beta=0.1)
    yield "shape_rewards", shaped
    yield "sequence_rewards", sequence_rewards(scores, token_kl, mask, beta=0.1)
    yield "rewards_to_go", rewards_to_go(shaped, mask)
    yield "generalised_advantages", generalised_advantages(shaped, values, mask)
    for scale in ("none", "std"):
        yield f"group_advantages/{scale}", group_advantages(scores, 3, scale=scale)
    yield "leave_one_out_advantages", leave_one_out_advantages(scores, 3)
    yield "whiten", whiten(values, mask)
    yield "controlled_kl", controlled_kl(p - q, token_kl, mask)
    yield "mismatch", mismatch(p, behaviour, mask)
    yield "measured_kl", measured_kl(token_kl, mask)
    for level in ("token", "sequence"):
        yield f"truncated_weights/{level}", truncated_weights(p, behaviour, mask, cap=1.4, level=level)
        yield (
            f"window_weights/{level}",
            window_weights(p, behaviour, mask, bounds=(0.6, 1.6), level=level),
        )
    yield "kl_mask", kl_mask(p, behaviour, mask, bounds=(0.0, 0.05))
    yield "geometric_mask", geometric_mask(p, behaviour, mask, bounds=(0.9, 1.1))
    yield "binary_divergence", binary_divergence(p, behaviour)
    yield "best_of_n", [best_of_n_kl(np.ones(10) / 10, np.arange(10.0), n) for n in (2, 4, 64)]


def run_uncertainty() -> Iterator[tuple[str, Any]]:
    """Estimates with their intervals from fixed arrays."""
    random = np.random.default_rng(9)
    for clusters in (7, 60, 2000):
        labels = np.repeat(np.arange(clusters), 5)
        values = random.lognormal(-1, 1.2, labels.size) + np.repeat(random.lognormal(-2, 1, clusters), 5)
        counts = random.integers(3, 40, clusters)
        sums = random.lognormal(0, 1, clusters) * counts
        other_sums = sums * random.lognormal(0, 0.1, clusters)
        yield f"clustered_mean/{clusters}", clustered_mean(values, labels, lower=0.0)
        mean = ratio_of_sums(sums, counts, lower=0.0)
        yield f"ratio_of_sums/{clusters}", mean
        yield f"paired_difference/{clusters}", paired_difference(sums, counts, other_sums, counts)
        yield f"transformed/{clusters}", transformed(mean, np.log, lambda x: 1 / x)
        yield f"running_mean/{clusters}", running_mean(sums, counts, 20)
        exact = values + random.normal(0, 0.05, values.size)
        yield f"controlled_total/{clusters}", controlled_total(values, exact, labels)
        yield (
            f"cluster_labels/{clusters}",
            cluster_labels(labels, np.tile(np.arange(5), clusters)),
        )
        yield f"effective_sample_size/{clusters}", effective_sample_size(sums)
    yield "zeros", ratio_of_sums(np.zeros(40), np.full(40, 9), lower=0.0)
    quantiles = [student_t_quantile(0.975, n) for n in (1, 2, 3.5, 10, 29, 1000)]
    yield "student_t_quantile", quantiles
