"""Exact divergences of two whole distributions, summed over the vocabulary; entropies; KL of Gaussians."""

from functools import reduce
from math import inf

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences.generator import phi
from kleash.divergences.table import (
    KL,
    Divergence,
    Side,
    alpha_record,
    find_divergence,
    jensen_shannon_record,
    positive_and_negative_part,
    skew_kl_record,
    weighted_generator,
)
from kleash.errors import ShapeError
from kleash.precision import at_least_float32, nan_unless_normalised
from kleash.registry import require_above

PART_NUMBERS = 1 << 17
"""Log-probabilities of one side in a part of ``divergence_of_rows``, if a row is not longer."""
RENYI_SERIES_NATS = 0.5
"""Up to this absolute value of the log-sum, the Rényi divergence is computed from the alpha divergence."""


@validated
def divergence(
    which: str | Divergence, logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """D(p || q) for a name of ``DIVERGENCES`` or for a ``Divergence`` record.

        D(p || q) = finish(sum_x p(x) f(log p(x) - log q(x)))

    Every token is evaluated from the side that gives it more mass, so nothing overflows unless the value does. The
    gradient is finite if the value is below a tenth of the largest number of its type, also at tokens with
    log-probability -inf on one side or both. Derivatives of every order are correct where log-probabilities are equal,
    in backward and forward mode. Half precision is computed and returned in float32. Rows that are not normalised, such
    as logits, are refused (``nan_unless_normalised``).

    Args:
        which: "kl", "jensen_shannon" ..., or a ``Divergence``.
        logp: natural log-probabilities, normalised over the last axis.
        logq: the same tokens under the other distribution.

    Raises:
        UnknownNameError: if there is no divergence of this name.
        VocabularyMismatchError: if the last axes differ.
        NotProbabilitiesError: on a CPU, if a row is not normalised; NaN elsewhere.
        ShapeError: if the leading axes differ, there is no axis, or the numbers are not floating-point.
    """
    record = find_divergence(which)
    return nan_unless_normalised(divergence_of_rows(record, logp, logq), logp=logp, logq=logq)


def divergence_of_rows(
    record: Divergence, logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """``divergence`` of log-probabilities that are known to be normalised.

    On a CPU it goes over parts of the rows, so that temporary tensors stay in the cache.
    """
    pair = promote_pair(logp, logq)
    if logp.device.type != "cpu" or torch.compiler.is_compiling() or not logp.numel():
        return record.finish(contributions(record, *pair).sum(-1))
    rows = max(PART_NUMBERS // logp.shape[-1], 1)
    parts = zip(*(x.reshape(-1, x.shape[-1]).split(rows) for x in pair), strict=True)
    sums = torch.cat([contributions(record, p, q).sum(-1) for p, q in parts])
    return record.finish(sums.reshape(logp.shape[:-1]))


def promote_pair(logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider dtype, at least float32."""
    wider = torch.promote_types(at_least_float32(logp).dtype, at_least_float32(logq).dtype)
    p = logp.to(wider)
    # One tensor on both sides is converted once, so that its gradient is rounded once.
    return p, p if logq is logp else logq.to(wider)


def contributions(
    record: Divergence, logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch vocab"]:
    """The contribution of each token to the sum, never negative; inputs as ``promote_pair`` returns them."""
    in_p, in_q = logp != -torch.inf, logq != -torch.inf
    both = in_p & in_q
    shared_p, shared_q = torch.where(both, logp, 0.0), torch.where(both, logq, 0.0)
    # One of the two gaps is 0, and f(0) is exactly 0: adding both sides selects the right one.
    ahead, behind = positive_and_negative_part(shared_p - shared_q)
    shared = weighted_generator(record.from_p, shared_p, ahead)
    shared = shared + weighted_generator(record.from_q, shared_q, behind)
    disjoint = torch.where(
        in_p, _times_limit(record.from_p, logp), torch.where(in_q, _times_limit(record.from_q, logq), 0.0)
    )
    return torch.where(both, shared, disjoint)


def _times_limit(side: Side, log_mass: Tensor) -> Tensor:
    """Contribution of mass where the other distribution is zero; infinite also if the mass underflows."""
    return (
        torch.where(log_mass.isnan(), log_mass, torch.inf)
        if side.limit == inf
        else log_mass.exp() * side.limit
    )


@validated
def kl(logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """KL(p || q) in nats, per distribution on the last axis.

        KL(p || q) = sum_x p(x) phi(log p(x) - log q(x)),    phi(u) = expm1(-u) + u

    |          | q > 0                  | q = 0 |
    | p > 0    | p phi(log p - log q)   | inf   |
    | p = 0    | q                      | 0     |

    The added terms ``q - p`` sum to zero, so this is the textbook sum without its cancellation: never negative, exactly
    0 for equal arguments, and an error in either normaliser enters at second order only. For pairs that nearly agree
    the remaining error is the rounding of the log-probabilities: in float32, over thousands of tokens, about 1e-4 of a
    KL of 1e-8 and 1e-6 of a KL of 1e-4 (over ten tokens three times that, in rare cases thirty times).

    The average is over the first argument. The gradient in p's logits is ``p (u - KL)``, in q's ``q - p``. A zero is a
    log-probability of -inf; a probability that underflows is not a zero. Over a whole vocabulary ``linear_kl``, from
    logits by ``Head(None)``, and ``torch.compile(kl, dynamic=True)`` take a fraction of the time and memory.

    Args:
        logp: natural log-probabilities, normalised over the last axis.
        logq: the same tokens under the other distribution.

    Returns:
        One number per leading position, in float64 if an input is float64, otherwise in float32.

    Raises:
        VocabularyMismatchError: if the last axes differ.
        NotProbabilitiesError: on a CPU, if a row is not normalised; NaN elsewhere.
        ShapeError: if the leading axes differ, or the numbers are not floating-point.

    References:
        Kullback & Leibler, "On Information and Sufficiency" (1951).

    >>> logp, logq = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> kleash.kl(logp, logq)
    tensor(0.5108)
    """
    return divergence("kl", logp, logq)


@validated
def jeffreys(
    logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """KL(p || q) + KL(q || p) in nats; ``inf`` if the supports differ.

    Raises:
        VocabularyMismatchError, NotProbabilitiesError, ShapeError: as ``kl``.

    >>> logp, logq = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> kleash.jeffreys(logp, logq)
    tensor(0.8789)
    """
    return divergence("jeffreys", logp, logq)


@validated
def jensen_shannon(
    logp: Float[Tensor, "*batch vocab"],
    logq: Float[Tensor, "*batch vocab"],
    weight: float = 0.5,
    *,
    normalised: bool = False,
) -> Float[Tensor, "*batch"]:
    """The weighted Jensen-Shannon divergence, in nats.

        weight KL(p || m) + (1 - weight) KL(q || m),    m = weight p + (1 - weight) q

    At most the entropy of a Bernoulli variable of that weight (log 2 at one half), also for disjoint supports. It
    vanishes as ``weight`` goes to 0 or 1; ``normalised`` divides by ``weight (1 - weight)``, which interpolates
    continuously from KL(p || q) at 0 to KL(q || p) at 1.

    Raises:
        OptionError: if ``weight`` is outside [0, 1].
        VocabularyMismatchError, NotProbabilitiesError, ShapeError: as ``kl``.

    References:
        Lin, "Divergence Measures Based on the Shannon Entropy" (1991).

    >>> logp, logq = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> kleash.jensen_shannon(logp, logq)
    tensor(0.1017)
    """
    return divergence(jensen_shannon_record(weight, normalised), logp, logq)


@validated
def skew_kl(
    logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"], mix: float
) -> Float[Tensor, "*batch"]:
    """KL(p || mix p + (1 - mix) q) in nats; at most -log mix.

    With ``mix`` 0 this is KL(p || q), with 1 it is 0.

    Raises:
        OptionError: if ``mix`` is outside [0, 1].
        VocabularyMismatchError, NotProbabilitiesError, ShapeError: as ``kl``.

    References:
        Ko et al., "DistiLLM: Towards Streamlined Distillation for Large Language Models" (2024),
        https://arxiv.org/abs/2402.03898

    >>> logp, logq = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> kleash.skew_kl(logp, logq, 0.1)
    tensor(0.3653)
    """
    return divergence(skew_kl_record(mix), logp, logq)


@validated
def alpha_divergence(
    logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"], alpha: float
) -> Float[Tensor, "*batch"]:
    """The alpha divergence: KL(q || p) at 0, four times the squared Hellinger distance at 1/2, KL(p || q) at 1.

        (sum_x p(x)^alpha q(x)^(1 - alpha) - 1) / (alpha (alpha - 1))

    For alpha >= 1, ``inf`` where q = 0 < p; for alpha <= 0, where p = 0 < q. Half of chi-squared at 2.

    Raises:
        OptionError: if ``alpha`` is not finite.
        VocabularyMismatchError, NotProbabilitiesError, ShapeError: as ``kl``.

    >>> logp, logq = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> kleash.alpha_divergence(logp, logq, 0.5)
    tensor(0.4223)
    """
    return divergence(alpha_record(alpha), logp, logq)


@validated
def renyi(
    logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"], order: float
) -> Float[Tensor, "*batch"]:
    """The Rényi divergence of an order above 0, in nats; of order 1 it is KL(p || q).

        log(sum_x p(x)^order q(x)^(1 - order)) / (order - 1)

    It increases with the order. For pairs that nearly agree it is computed from ``alpha_divergence``, whose terms do
    not cancel; for others by a log-sum-exp, which does not overflow. For orders from 1 on, ``inf`` where q = 0 < p;
    below 1 only for disjoint supports.

    Args:
        logp: natural log-probabilities, normalised over the last axis.
        logq: the same tokens under the other distribution.
        order: above 0, finite.

    Raises:
        OptionError: if ``order`` is not.
        VocabularyMismatchError, NotProbabilitiesError, ShapeError: as ``kl``.

    References:
        van Erven & Harremoës, "Rényi Divergence and Kullback-Leibler Divergence" (2014),
        https://arxiv.org/abs/1206.2459

    >>> logp, logq = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> kleash.renyi(logp, logq, 2.0)
    tensor(1.0217)
    """
    require_above(0.0, order=order)
    if order == 1:
        return divergence(KL, logp, logq)
    p, q = promote_pair(logp, logq)
    log_sum = _renyi_log_sum(p, q, order)
    near = log_sum.abs() < RENYI_SERIES_NATS
    near_q = torch.where(near.unsqueeze(-1), q, p)
    excess = order * (order - 1) * divergence_of_rows(alpha_record(order), p, near_q)
    values = torch.where(near, torch.log1p(excess), log_sum) / (order - 1)
    return nan_unless_normalised(values, logp=logp, logq=logq)


def _renyi_log_sum(logp: Tensor, logq: Tensor, order: float) -> Tensor:
    """log sum_x p(x)^order q(x)^(1 - order)."""
    in_p, in_q = logp != -torch.inf, logq != -torch.inf
    both = in_p & in_q
    shared = order * torch.where(both, logp, 0.0) + (1 - order) * torch.where(both, logq, 0.0)
    terms = torch.where(both, shared, -inf)
    return torch.where(in_p & ~in_q, inf if order > 1 else -inf, terms).logsumexp(-1)


@validated
def chi_squared(
    logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """sum (p - q)^2 / q: the variance of the weight p/q under ``q``; no unit. ``inf`` where q = 0 < p.

    Raises:
        VocabularyMismatchError, NotProbabilitiesError, ShapeError: as ``kl``.

    >>> logp, logq = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> kleash.chi_squared(logp, logq)
    tensor(1.7778)
    """
    return divergence("chi_squared", logp, logq)


@validated
def total_variation(
    logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """Half of sum |p - q|: the largest difference in the probability of any event; 0 to 1, no unit.

    Its first and second derivatives are 0 at a token with equal probabilities.

    Raises:
        VocabularyMismatchError, NotProbabilitiesError, ShapeError: as ``kl``.

    >>> logp, logq = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> kleash.total_variation(logp, logq)
    tensor(0.4000)
    """
    return divergence("total_variation", logp, logq)


@validated
def hellinger(
    logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """The Hellinger distance, sqrt(1 - sum sqrt(p q)); 0 to 1, no unit.

    It has a kink at p = q: the gradient there is 0 and the second derivative NaN.

    Raises:
        VocabularyMismatchError, NotProbabilitiesError, ShapeError: as ``kl``.

    >>> logp, logq = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> kleash.hellinger(logp, logq)
    tensor(0.3249)
    """
    return divergence("hellinger", logp, logq)


@validated
def entropy(logp: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """The entropy H(p) = -sum p log p in nats, from 0 to the logarithm of the vocabulary's size.

    A token of probability 0 adds 0, in value and gradient.

    Raises:
        NotProbabilitiesError, ShapeError: as ``kl``.

    >>> kleash.entropy(torch.tensor([0.5, 0.5]).log())
    tensor(0.6931)
    """
    return nan_unless_normalised(cross_entropy_of_rows(logp, logp), logp=logp)


@validated
def cross_entropy(
    logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """The cross-entropy H(p, q) = -sum p log q = H(p) + KL(p || q), in nats.

    |          | q > 0      | q = 0 |
    | p > 0    | -p log q   | inf   |
    | p = 0    | 0          | 0     |

    It is not a divergence: for p = q it is H(p). For the difference use ``kl``, which does not cancel.

    Raises:
        VocabularyMismatchError, NotProbabilitiesError, ShapeError: as ``kl``.

    >>> logp, logq = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> kleash.cross_entropy(logp, logq)
    tensor(1.2040)
    """
    return nan_unless_normalised(cross_entropy_of_rows(logp, logq), logp=logp, logq=logq)


def cross_entropy_of_rows(
    logp: Float[Tensor, "*batch vocab"], logq: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """``cross_entropy`` of log-probabilities that are known to be normalised."""
    logp, logq = promote_pair(logp, logq)
    in_p, in_q = logp != -torch.inf, logq != -torch.inf
    both = in_p & in_q
    shared = -torch.exp(torch.where(both, logp, 0.0)) * torch.where(both, logq, 0.0)
    return torch.where(in_p & ~in_q, torch.inf, torch.where(both, shared, 0.0)).sum(-1)


@validated
def kl_gaussian(
    mean_p: Float[Tensor, "..."],
    log_variance_p: Float[Tensor, "..."],
    mean_q: Float[Tensor, "..."] | float = 0.0,
    log_variance_q: Float[Tensor, "..."] | float = 0.0,
) -> Float[Tensor, "*batch"]:
    """KL(p || q) of Gaussians with diagonal covariance, in nats, summed over the last axis.

        sum_i (phi(log_variance_q - log_variance_p) + (mean_p - mean_q)^2 exp(-log_variance_q)) / 2

    By default ``q`` is the standard normal, which gives the regulariser of a VAE. The four arguments broadcast against
    each other. Log-variances must be finite.

    Raises:
        ShapeError: if they do not broadcast, or have no axis to sum over.

    References:
        Kingma & Welling, "Auto-Encoding Variational Bayes" (2013), https://arxiv.org/abs/1312.6114

    >>> mean, log_variance = torch.tensor([1.0, 0.0]), torch.zeros(2)
    >>> kleash.kl_gaussian(mean, log_variance)  # from the standard normal
    tensor(0.5000)
    """
    sides = mean_p, log_variance_p, mean_q, log_variance_q
    wider = reduce(torch.promote_types, (x.dtype for x in sides if isinstance(x, Tensor)), torch.float32)
    parameters = [x.to(wider) if isinstance(x, Tensor) else mean_p.new_tensor(x, dtype=wider) for x in sides]
    try:
        torch.broadcast_shapes(*(x.shape for x in parameters))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in parameters)
        raise ShapeError(f"means and log-variances of shapes {shapes} do not broadcast") from error
    if all(x.ndim == 0 for x in parameters):
        raise ShapeError("means and log-variances have no axis to sum over; give at least one dimension")
    mean_p, log_variance_p, mean_q, log_variance_q = parameters
    distance = (mean_p - mean_q) * torch.exp(-log_variance_q / 2)
    return ((phi(log_variance_q - log_variance_p) + distance.square()) / 2).sum(-1)
