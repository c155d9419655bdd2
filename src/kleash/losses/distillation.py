"""Distillation: a divergence between a teacher's and a student's next-token distributions, per token."""

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import DIVERGENCES, Divergence, at_temperature, find_divergence, jensen_shannon_record
from kleash.divergences.functions import divergence_of_rows
from kleash.losses.surrogate import require_gradient
from kleash.losses.top_k import Drawn, sampled_tail_loss, tail_bucket_loss, top_k_from, top_k_of
from kleash.masking import as_mask


@validated
def distillation_loss(
    teacher_logits: Float[Tensor, "*tokens vocab"],
    student_logits: Float[Tensor, "*tokens vocab"],
    mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"],
    *,
    divergence: str | Divergence = "kl",
    temperature: float = 1.0,
    times_temperature_squared: bool = False,
) -> Float[Tensor, "*tokens"]:
    """D(teacher || student) per token, in nats, both at one temperature; 0 where masked.

        D(softmax(teacher_logits / temperature) || softmax(student_logits / temperature))

    The teacher is the first argument ``p``: "kl" averages over the teacher, so that the student covers all of the
    teacher's responses; "reverse_kl" averages over the student. Masked values (NaN in padding) are not read and get
    gradient 0. The gradient flows to each side that requires one: run the teacher under ``torch.no_grad()``. The loss
    is per token; average it by ``mean_of(loss, mask)`` or ``aggregate``.

    The gradient in the student's logits is proportional to 1/temperature^2. ``times_temperature_squared`` multiplies
    value and gradient by temperature^2, as Hinton et al. do, to keep its size relative to a loss on labels. By default
    the value is the divergence itself.

    Args:
        teacher_logits: vocabulary on the last axis; log-probabilities may be passed as logits.
        student_logits: of the same positions and tokens.
        mask: true (or 1) for the positions that count.
        divergence: a name of ``DIVERGENCES``, or a record: ``gkd_record(weight)``, ``skew_kl_record(mix)``
            and its ``.swapped`` (DistiLLM's two), ``jensen_shannon_record(weight, normalised=True)``.
        temperature: divides both sides' logits; above 0.
        times_temperature_squared: whether to multiply by temperature^2.

    Raises:
        VocabularyMismatchError: if the last axes differ.
        ShapeError: if the leading axes and the mask differ in shape.
        OptionError: if ``temperature`` is not a finite number above 0.
        UnknownNameError: if there is no such divergence.
        DetachedError: if gradients are enabled and the student carries none, as in the order (student, teacher).

    References:
        Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), https://arxiv.org/abs/1503.02531
        Agarwal et al., "On-Policy Distillation of Language Models" (2023), https://arxiv.org/abs/2306.13649
        Ko et al., "DistiLLM: Towards Streamlined Distillation for Large Language Models" (2024),
        https://arxiv.org/abs/2402.03898
    """
    is_counted = as_mask(mask)
    require_gradient(student_logits, name="student_logits, the second argument,")
    logp, logq = (
        at_temperature(torch.where(is_counted.unsqueeze(-1), logits, 0.0), temperature)
        for logits in (teacher_logits, student_logits)
    )
    per_token = divergence_of_rows(find_divergence(divergence), logp, logq)
    return per_token * temperature**2 if times_temperature_squared else per_token


@validated
def top_k_distillation_loss(
    teacher_ids: Int[Tensor, "*tokens k"],
    teacher_logp: Float[Tensor, "*tokens k"],
    student_logits: Float[Tensor, "*tokens vocab"],
    mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"],
    *,
    divergence: str | Divergence = "kl",
    temperature: float = 1.0,
    drawn: tuple[Int[Tensor, "*tokens"], Float[Tensor, "*tokens"]] | None = None,
) -> Float[Tensor, "*tokens"]:
    """D(teacher || student) per token, in nats, from the teacher's k likeliest tokens: from below, or unbiased.

    ``tail_bucket_loss`` of the teacher's tokens and the same tokens of the student: never above ``distillation_loss``,
    and above 0 while the student has mass elsewhere. With ``drawn``, ``sampled_tail_loss``: unbiased in value and
    gradient where the teacher drew the tokens. ``temperature`` must be the temperature of the teacher's
    log-probabilities, which were normalised over its whole vocabulary; a list of the likeliest tokens cannot be
    converted to another temperature.

    Args:
        teacher_ids: distinct tokens at each position; negative ids are padding of shorter lists, with a log-probability
            of -inf. Masked positions are not read.
        teacher_logp: their log-probabilities in the teacher's whole distribution, not renormalised.
        student_logits: of the whole vocabulary, which must be the teacher's.
        mask: true (or 1) for the positions that count; elsewhere value and gradient are 0.
        divergence: a name of ``DIVERGENCES``, or a record.
        temperature: of the teacher's log-probabilities; divides the student's logits.
        drawn: the token that the teacher drew at each position, and its log-probability; masked ones are not read.

    Raises:
        ShapeError: if the shapes do not fit together.
        OptionError: if ``temperature`` is not a finite number above 0; for "hellinger" with ``drawn``.
        UnknownNameError: if there is no such divergence.
        DetachedError: if gradients are enabled and neither side carries one.
    """
    is_counted = as_mask(mask)
    is_token_counted = is_counted.unsqueeze(-1)
    ids = torch.where(is_token_counted, teacher_ids, 0)
    student = at_temperature(torch.where(is_token_counted, student_logits, 0.0), temperature)
    teacher = top_k_from(ids, torch.where(is_token_counted, teacher_logp, -torch.inf))
    listed = top_k_of(student, ids)
    if drawn is None:
        return tail_bucket_loss(teacher, listed, is_counted, divergence=divergence)
    tokens = torch.where(is_counted, drawn[0], 0).long()
    sample = Drawn(tokens, drawn[1], student.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
    return sampled_tail_loss(teacher, listed, sample, is_counted, divergence=divergence)


@validated
def gkd_record(weight: float) -> Divergence:
    """The generalised Jensen-Shannon divergence of GKD, as a record.

        weight KL(p || m) + (1 - weight) KL(q || m),    m = weight p + (1 - weight) q

    and, by convention, KL(p || q) at weight 0 and KL(q || p) at weight 1. These are not the limits: in between it is
    proportional to ``weight (1 - weight)`` near the ends, so it falls about a hundredfold from weight 0 to 0.01.
    ``jensen_shannon_record(weight, normalised=True)`` has the same values at the ends and is continuous.

    Args:
        weight: the weight of ``p``, the teacher, in the mixture ("beta" in GKD), from 0 to 1.

    Raises:
        OptionError: if ``weight`` is outside [0, 1].

    References:
        Agarwal et al., "On-Policy Distillation of Language Models" (2023), https://arxiv.org/abs/2306.13649
    """
    if weight in (0, 1):
        return DIVERGENCES["reverse_kl" if weight else "kl"]
    return jensen_shannon_record(weight)
