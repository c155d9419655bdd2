"""The divergences by name, each its equation."""

from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences.exact import divergence
from kleash.divergences.families import alpha_record, jensen_shannon_record, skew_kl_record


@validated
def kl(
    logp: Float[Tensor, "*batch_p vocab_p"], logq: Float[Tensor, "*batch_q vocab_q"]
) -> Float[Tensor, "*batch_p"]:
    """KL(p || q) in nats: how many nats per draw ``x ~ p`` it costs to believe ``q``.

        KL(p || q) = sum_x p(x) phi(log p(x) - log q(x)),    phi(u) = expm1(-u) + u

    |          | q > 0                  | q = 0 |
    | p > 0    | p phi(log p - log q)   | inf   |
    | p = 0    | q                      | 0     |

    The added terms ``q - p`` sum to zero, so this is the textbook sum without its cancellation:
    never negative, exactly 0 for equal arguments, and an error in a normaliser of either argument
    enters at second order only. What remains for pairs that nearly agree is the rounding of the
    log-probabilities themselves: in float32, over thousands of tokens, about 1e-4 of a KL of 1e-8 and
    1e-6 of one of 1e-4 (over ten tokens three times that, and thirty times for the odd pair).

    The first argument is the one averaged over. The gradient in p's logits is ``p (u - KL)``, in q's
    ``q - p``. A zero is a log-probability of -inf; a probability that merely underflows is not one.

    Args:
        logp: natural log-probabilities, normalised over the last axis.
        logq: the same tokens under the other distribution.

    Returns:
        One number per leading position, in float32 or, where the inputs are that, float64.

    Raises:
        VocabularyMismatchError: if the last axes differ.
        ShapeError: if the others do, or the numbers are not floating-point.

    References:
        Kullback & Leibler, "On Information and Sufficiency" (1951).
    """
    return divergence("kl", logp, logq)


@validated
def jeffreys(
    logp: Float[Tensor, "*batch_p vocab_p"], logq: Float[Tensor, "*batch_q vocab_q"]
) -> Float[Tensor, "*batch_p"]:
    """KL(p || q) + KL(q || p) in nats: symmetric; ``inf`` where either rules out what the other may say.

    Raises:
        VocabularyMismatchError, ShapeError: as ``kl``.
    """
    return divergence("jeffreys", logp, logq)


@validated
def jensen_shannon(
    logp: Float[Tensor, "*batch_p vocab_p"],
    logq: Float[Tensor, "*batch_q vocab_q"],
    weight: float = 0.5,
    *,
    normalised: bool = False,
) -> Float[Tensor, "*batch_p"]:
    """How well one draw tells which of the two it came from, in nats.

        weight KL(p || m) + (1 - weight) KL(q || m),    m = weight p + (1 - weight) q

    At most the entropy of a coin of that weight (log 2 at one half), also where the supports do not
    overlap. It vanishes as ``weight`` goes to 0 or 1; ``normalised`` divides by
    ``weight (1 - weight)``, which leads continuously from KL(p || q) at 0 to KL(q || p) at 1.

    Raises:
        OptionError: if ``weight`` is outside [0, 1].
        VocabularyMismatchError, ShapeError: as ``kl``.

    References:
        Lin, "Divergence Measures Based on the Shannon Entropy" (1991).
    """
    return divergence(jensen_shannon_record(weight, normalised), logp, logq)


@validated
def skew_kl(
    logp: Float[Tensor, "*batch_p vocab_p"], logq: Float[Tensor, "*batch_q vocab_q"], mix: float
) -> Float[Tensor, "*batch_p"]:
    """KL(p || mix p + (1 - mix) q) in nats: a KL that never exceeds -log mix.

    ``mix`` 0 is KL(p || q), 1 is 0 everywhere.

    Raises:
        OptionError: if ``mix`` is outside [0, 1].
        VocabularyMismatchError, ShapeError: as ``kl``.

    References:
        Ko et al., "DistiLLM: Towards Streamlined Distillation for Large Language Models" (2024),
        https://arxiv.org/abs/2402.03898
    """
    return divergence(skew_kl_record(mix), logp, logq)


@validated
def alpha_divergence(
    logp: Float[Tensor, "*batch_p vocab_p"], logq: Float[Tensor, "*batch_q vocab_q"], alpha: float
) -> Float[Tensor, "*batch_p"]:
    """The family that joins KL(q || p) at 0, four times the squared Hellinger at 1/2, and KL(p || q) at 1.

        (sum_x p(x)^alpha q(x)^(1 - alpha) - 1) / (alpha (alpha - 1))

    ``inf`` where ``q`` is 0 under ``p`` for alpha >= 1, and the other way round for alpha <= 0.
    Half of chi-squared at 2.

    Raises:
        OptionError: if ``alpha`` is not finite.
        VocabularyMismatchError, ShapeError: as ``kl``.
    """
    return divergence(alpha_record(alpha), logp, logq)


@validated
def chi_squared(
    logp: Float[Tensor, "*batch_p vocab_p"], logq: Float[Tensor, "*batch_q vocab_q"]
) -> Float[Tensor, "*batch_p"]:
    """sum (p - q)^2 / q: the variance of the weight p/q under ``q``; no unit. ``inf`` where q = 0 < p.

    Raises:
        VocabularyMismatchError, ShapeError: as ``kl``.
    """
    return divergence("chi_squared", logp, logq)


@validated
def total_variation(
    logp: Float[Tensor, "*batch_p vocab_p"], logq: Float[Tensor, "*batch_q vocab_q"]
) -> Float[Tensor, "*batch_p"]:
    """Half of sum |p - q|: the most by which the two can differ on any event; 0 to 1, no unit.

    Its first and second derivatives take 0 for a token on which the two agree exactly.

    Raises:
        VocabularyMismatchError, ShapeError: as ``kl``.
    """
    return divergence("total_variation", logp, logq)


@validated
def hellinger(
    logp: Float[Tensor, "*batch_p vocab_p"], logq: Float[Tensor, "*batch_q vocab_q"]
) -> Float[Tensor, "*batch_p"]:
    """The Hellinger distance, sqrt(1 - sum sqrt(p q)); 0 to 1, no unit.

    A distance has a kink at 0: where the two agree exactly, its gradient is taken to be 0, and it has no
    second derivative: NaN.

    Raises:
        VocabularyMismatchError, ShapeError: as ``kl``.
    """
    return divergence("hellinger", logp, logq)
