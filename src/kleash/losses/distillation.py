"""Distillation: a divergence between a teacher's and a student's next-token distributions, per token."""

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.divergences import DIVERGENCES, Divergence, at_temperature, jensen_shannon_record
from kleash.divergences.exact import divergence as exact_divergence
from kleash.errors import OptionError, ShapeError, VocabularyMismatchError
from kleash.masking import as_mask


def distillation_loss(
    teacher_logits: Float[Tensor, "*tokens_t vocab_t"],
    student_logits: Float[Tensor, "*tokens_s vocab_s"],
    mask: Bool[Tensor, "*tokens_m"] | Integer[Tensor, "*tokens_m"],
    *,
    divergence: str | Divergence = "kl",
    temperature: float = 1.0,
    times_temperature_squared: bool = False,
) -> Float[Tensor, "*tokens_t"]:
    """D(teacher || student) per token, in nats, both at one temperature; 0 where masked.

        D(softmax(teacher_logits / temperature) || softmax(student_logits / temperature))

    The teacher is the first argument, the ``p``: "kl" averages over the teacher and makes the student
    cover all it might say, "reverse_kl" averages over the student. What is masked (NaN in padding) is
    not read and gets gradient 0. The gradient goes to whichever side requires one: run the teacher
    under ``torch.no_grad()``. Per token, so that you choose the mean: ``mean_of(loss, mask)``.

    The gradient in the student's logits shrinks with 1/temperature^2; ``times_temperature_squared``
    multiplies value and gradient by temperature^2, as Hinton et al. do, which keeps its size beside a
    loss on labels. It is off unless asked for, and the value is then the divergence itself.

    Args:
        teacher_logits: natural scale, vocabulary on the last axis; log-probabilities may stand for them.
        student_logits: the same positions and tokens.
        mask: true (or 1) for the positions that count.
        divergence: a name of ``DIVERGENCES``, or a record: ``gkd_record(weight)``, ``skew_kl_record(mix)``
            and its ``.swapped`` (DistiLLM's two), ``jensen_shannon_record(weight, normalised=True)``.
        temperature: divides both sides' logits; above 0.
        times_temperature_squared: whether to multiply by temperature^2.

    Raises:
        VocabularyMismatchError: if the last axes differ.
        ShapeError: if the others do.
        OptionError: if ``temperature`` is not a finite number above 0.
        UnknownNameError: if there is no such divergence.

    References:
        Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), https://arxiv.org/abs/1503.02531
        Agarwal et al., "On-Policy Distillation of Language Models" (2023), https://arxiv.org/abs/2306.13649
        Ko et al., "DistiLLM: Towards Streamlined Distillation for Large Language Models" (2024),
        https://arxiv.org/abs/2402.03898
    """
    counts = as_mask(mask)
    _require_pair(teacher_logits, student_logits, counts)
    logp, logq = (
        at_temperature(torch.where(counts.unsqueeze(-1), logits, 0.0), temperature)
        for logits in (teacher_logits, student_logits)
    )
    per_token = exact_divergence(divergence, logp, logq)
    return per_token * temperature**2 if times_temperature_squared else per_token


def gkd_record(weight: float) -> Divergence:
    """The generalised Jensen-Shannon divergence as GKD and its descendants compute it.

        weight KL(p || m) + (1 - weight) KL(q || m),    m = weight p + (1 - weight) q

    and at the ends, by convention, KL(p || q) at 0 and KL(q || p) at 1. Those are no limits: between
    them it shrinks like ``weight (1 - weight)``, so that from weight 0 to 0.01 it drops about a
    hundredfold. ``jensen_shannon_record(weight, normalised=True)`` has the same ends, without the drop.

    Args:
        weight: the teacher's share of the mixture where ``p`` is the teacher ("beta" in GKD), from 0 to 1.

    Raises:
        OptionError: if ``weight`` is outside [0, 1].

    References:
        Agarwal et al., "On-Policy Distillation of Language Models" (2023), https://arxiv.org/abs/2306.13649
    """
    if not 0 <= weight <= 1:
        raise OptionError(f"weight is {weight}; it is a share, from 0 to 1")
    if weight in (0, 1):
        return DIVERGENCES["reverse_kl" if weight else "kl"]
    return jensen_shannon_record(weight)


def _require_pair(teacher: Tensor, student: Tensor, counts: Tensor) -> None:
    if teacher.shape[-1:] != student.shape[-1:]:
        raise VocabularyMismatchError(
            f"teacher_logits cover {teacher.shape[-1]} tokens and student_logits {student.shape[-1]}; "
            "pad or project one onto the other's vocabulary first"
        )
    if teacher.shape != student.shape or teacher.shape[:-1] != counts.shape:
        raise ShapeError(
            f"teacher_logits are {tuple(teacher.shape)}, student_logits {tuple(student.shape)} and the mask "
            f"{tuple(counts.shape)}; give the logits of the same positions and one mask entry for each"
        )
