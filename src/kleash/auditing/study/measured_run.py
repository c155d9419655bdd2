"""Case (e): a run of ``kleash measure``, whose tokens carry the exact KL beside what was drawn."""

from pathlib import Path

import numpy as np

from kleash.auditing.study.drawn import control_weight, exact_row_from, rows_from
from kleash.errors import OptionError
from kleash.records import Measurement, RunFolder
from kleash.records.study import StudyCase

READ = ["prompt_id", "logp_policy", "logp_reference", "logp_sampled", "kl_policy_reference"]


def run_case(folder: Path) -> StudyCase:
    """Every estimator on a measured run, against the exact KL at the same tokens; errors by prompt.

    Where somebody else drew the responses and said with which probability, each token carries its
    importance weight, as in the measurement itself.

    Args:
        folder: a run folder of ``kleash measure``.

    Raises:
        RunFolderError: if it is none, damaged or unfinished.
        OptionError: if no average over its tokens estimates KL(policy || reference).
    """
    measurement = Measurement.read(folder)
    if not measurement.estimators:
        raise OptionError(
            f"{folder} has no tokens that estimate a KL: {measurement.estimators_note}; "
            "study a run whose tokens the policy drew"
        )
    parts = list(RunFolder(folder).token_parts(READ))
    prompts = np.concatenate([part["prompt_id"] for part in parts])
    logp, logq, drawn, exact = (
        np.concatenate([part[name].astype(np.float64) for part in parts]) for name in READ[1:]
    )
    with np.errstate(invalid="ignore"):
        u = np.where(logp == logq, 0.0, logp - logq)
    weighted = measurement.job.get("responses") is not None and bool(np.isfinite(drawn).all())
    weights = np.exp(logp - drawn) if weighted else np.ones(len(u))
    policy, reference = (measurement.models[role].path for role in ("policy", "reference"))
    kl = exact_row_from(exact, prompts)
    return StudyCase(
        name="run",
        title=f"Measured: {policy} against {reference}",
        drawn=f"one of {len(u)} tokens of {measurement.counts.sequences} responses; {measurement.estimand}",
        kl=kl.value,
        rows=(*rows_from(u, exact, prompts, weights), kl),
        notes=(
            f"the controlled estimate has a = {control_weight(u, exact, weights):.3f}, fitted on the same tokens",
            "a run keeps no whole distributions, so that the gradient is not known",
        ),
    )
