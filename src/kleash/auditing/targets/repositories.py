"""Frameworks whose KL code is audited from a checkout of their repository: ``kleash audit NAME --source FOLDER``.

A case names a function of a file, which is loaded without the framework (``checkouts``), and the convention by which
the framework calls it.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kleash.auditing.conventions import Convention
from kleash.auditing.targets.cases import STUDENT_NOTE, Case, Target, as_in_words, make_case
from kleash.auditing.toy_distributions import AuditInputs


def with_ratio(keyword: str, *, of_behaviour: bool = True) -> Convention:
    """f(token_logp, token_logq, keyword=ratio); the ratio is p / behaviour, or p / p of value 1, with its gradient."""
    below, words = (
        ("behaviour_logp", "behaviour") if of_behaviour else ("token_logp.detach()", "(p, detached)")
    )
    return as_in_words(
        f"f(token_logp, token_logq, {keyword}=(token_logp - {below}).exp())",
        f"f(token_logp, token_logq, {keyword}=p / {words})",
    )


def ref_kl_loss(function: Callable[..., Any], inputs: AuditInputs) -> Tensor:
    """prime-rl's loss of each response, called with a record of its tensors."""
    names = ("trainer_logprobs", "ref_logprobs", "inference_logprobs", "loss_mask")
    columns = (inputs.token_logp, inputs.token_logq, inputs.behaviour_logp, inputs.mask)
    records = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
    return torch.stack([function(SimpleNamespace(loss_weights=None, **record)).loss for record in records])


NEMO_KL = "nemo_rl/algorithms/utils.py:calculate_kl"
NEMO_DISTILLATION = "nemo_rl/algorithms/loss/loss_functions.py:DistillationLossFn"
NEMO_BATCH = (
    "dict(input_ids=labels, token_mask=F.pad(mask.float(), (1, 0)), sample_mask=torch.ones(len(mask)))"
)
SKYRL_KL = "skyrl/backends/skyrl_train/utils/ppo_utils.py:compute_approx_kl"
MILES_KL = "miles/backends/training_utils/loss_hub/math_utils.py:compute_approx_kl"
PRIME_LOSS = "src/prime_rl/trainer/rl/loss.py"
PENALTY_NOTE = "subtracted from the reward of its token"
MEAN_NOTE = "per token; the trainer takes a mean of it"
MISMATCH = "f(token_logq, token_logp)[2] -> metric"
MODULE = "f()(logits_p.flatten(0, 1), logits_q.flatten(0, 1), labels.flatten()) -> mean"
ESTIMATE_KL = "f((token_logp - token_logq).clamp(-40, 40), {ratio})[{index}]"
"""Open Instruct's estimators, of which the configuration chooses one by its index."""
SLIME_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")


def compute_approx_kl_cases(audits: str) -> tuple[Case, ...]:
    """The cases of slime, and of miles, which began as a copy of it."""
    unbiased = "--use-unbiased-kl"
    ratio = with_ratio("importance_ratio")
    return (
        *(make_case(kind, audits, "loss", MEAN_NOTE, kl_loss_type=kind) for kind in SLIME_ESTIMATORS),
        *(
            make_case(f"{kind}_unbiased", audits, ratio, MEAN_NOTE, unbiased, kl_loss_type=kind)
            for kind in SLIME_ESTIMATORS
        ),
        *(
            make_case(f"reward_{kind}", audits, "reward", PENALTY_NOTE, kl_loss_type=kind)
            for kind in ("k1", "low_var_kl")
        ),
    )


NEMO_RL = Target(
    name="nemo-rl",
    package="nemo_rl",
    repository="https://github.com/NVIDIA-NeMo/RL",
    cases=(
        *(
            make_case(
                f"loss_{kind}",
                NEMO_KL,
                with_ratio("importance_sampling_weights", of_behaviour=False),
                MEAN_NOTE,
                "the weight as ClippedPGLossFn makes it, without use_on_policy_kl_approximation",
                kl_type=kind,
            )
            for kind in ("k1", "k2", "k3")
        ),
        *(
            make_case(
                f"loss_{kind}_approximation",
                NEMO_KL,
                with_ratio("importance_sampling_weights"),
                MEAN_NOTE,
                "the weight as ClippedPGLossFn makes it, with use_on_policy_kl_approximation",
                kl_type=kind,
            )
            for kind in ("k2", "k3")
        ),
        *(
            make_case(f"reward_{kind}", NEMO_KL, "reward", PENALTY_NOTE, kl_type=kind)
            for kind in ("k1", "k2", "k3")
        ),
        make_case(
            "gen_kl_error",
            NEMO_KL,
            "metric",
            "the inference engine is p, the trainer q",
            kl_type="k3",
            input_clamp_value=None,
            output_clamp_value=None,
        ),
        *(
            make_case(
                f"distillation_{kind}",
                NEMO_DISTILLATION,
                as_in_words(
                    f"f(SimpleNamespace(kl_type={kind!r}, mixed_kl_weight=1, zero_outside_topk=False))"
                    f"(logp, logq, None, {NEMO_BATCH}, None, mask.sum())[0] -> mean {claims}",
                    f"f({kind})(logp, logq, None, batch, None, mask.sum())[0]",
                ),
                STUDENT_NOTE,
                "the likeliest tokens are all tokens",
            )
            for kind, claims in (("forward", "reverse_kl"), ("reverse", "kl"))
        ),
    ),
    not_audited=("distillation between tokenizers, and of draft models",),
)
SKYRL = Target(
    name="skyrl",
    package="skyrl",
    repository="https://github.com/NovaSky-AI/SkyRL",
    cases=(
        *(
            make_case(f"loss_{kind}", SKYRL_KL, "loss_with_mask", MEAN_NOTE, kl_estimator_type=kind)
            for kind in ("k1", "abs", "k2", "k3")
        ),
        *(
            make_case(f"reward_{kind}", SKYRL_KL, "reward_with_mask", PENALTY_NOTE, kl_estimator_type=kind)
            for kind in ("k1", "abs", "k2", "k3")
        ),
    ),
)
SLIME = Target(
    name="slime",
    package="slime",
    repository="https://github.com/THUDM/slime",
    cases=compute_approx_kl_cases("slime/utils/ppo_utils.py:compute_approx_kl"),
)
MILES = Target(
    name="miles",
    package="miles",
    repository="https://github.com/radixark/miles",
    cases=compute_approx_kl_cases(MILES_KL),
)
PRIME_RL = Target(
    name="prime-rl",
    package="prime_rl",
    repository="https://github.com/PrimeIntellect-ai/prime-rl",
    cases=(
        make_case(
            "ref_kl",
            f"{PRIME_LOSS}:ref_kl_loss_fn",
            Convention(
                name="ref_kl_loss",
                summary="f(record of log-probabilities and mask).loss of each response -> [sequences]",
                call=ref_kl_loss,
                gives="sequence",
                takes_behaviour=True,
                takes_mask=True,
            ),
            "on-policy distillation: q is the teacher",
            "includes, off-policy alone, prime-rl's trust region and 0.001 (log p - log behaviour)^2",
        ),
        make_case(
            "mismatch_kl",
            f"{PRIME_LOSS}:compute_importance_ratio_and_mismatch_kl",
            MISMATCH,
            "the inference engine is p, the trainer q",
        ),
    ),
    not_audited=(
        "the squared log ratio of the other losses, a penalty between trainer and inference engine",
    ),
)
OPEN_INSTRUCT = Target(
    name="open-instruct",
    package="open_instruct",
    repository="https://github.com/allenai/open-instruct",
    cases=tuple(
        make_case(
            f"kl_estimator_{index}",
            "open_instruct/model_utils.py:estimate_kl",
            as_in_words(
                ESTIMATE_KL.format(index=index, ratio=ratio),
                f"f(token_logp - token_logq, clamped at 40, p / behaviour)[{index}]",
            ),
            MEAN_NOTE,
        )
        for index, ratio in enumerate(
            (*3 * ("torch.ones_like(token_logp)",), "(token_logp - behaviour_logp).exp()")
        )
    ),
)
TORCHTUNE = Target(
    name="torchtune",
    package="torchtune",
    repository="https://github.com/pytorch/torchtune",
    cases=tuple(
        make_case(
            name,
            f"torchtune/modules/loss/kd_losses.py:{name}",
            as_in_words(f"{times}{MODULE} {claims}", f"{times}f()(logits_p, logits_q, labels)"),
            STUDENT_NOTE,
        )
        for name, claims, times in (
            ("ForwardKLLoss", "reverse_kl", ""),
            ("ReverseKLLoss", "kl", ""),
            ("SymmetricKLLoss", "jeffreys", "2 * "),  # by its own words a mean of both
        )
    ),
    not_audited=(
        "the forms with chunked output, which call these for each chunk",
        "GRPOLoss, whose masked mean is of another file",
    ),
)
REPOSITORIES = (NEMO_RL, SKYRL, SLIME, MILES, PRIME_RL, OPEN_INSTRUCT, TORCHTUNE)
