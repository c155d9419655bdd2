"""Sequences to score, and every column of their scores by sums over the vocabulary in float64."""

import math

import numpy as np
from scipy.special import log_softmax
from tiny_models import double_logits

from kleash.models import TokenSequence
from kleash.store.tables import TOKEN_COLUMNS


def sequence_of(prompt_ids, response_ids, **more):
    """A sequence of these tokens; its texts are empty and its numbers 0 where ``more`` does not say otherwise."""
    texts = {"prompt_id": 0, "sample_id": 0, "prompt_text": "", "response_text": ""}
    return TokenSequence(prompt_ids=tuple(prompt_ids), response_ids=tuple(response_ids), **{**texts, **more})


def random_sequences(lengths=((5, 7), (1, 12), (9, 1), (3, 3)), seed=0, vocabulary=300):
    """Random sequences of (prompt, response) lengths."""
    rng = np.random.default_rng(seed)
    return [
        sequence_of(*(rng.integers(3, vocabulary, length).tolist() for length in both), prompt_id=n)
        for n, both in enumerate(lengths)
    ]


def columns_by_enumeration(policy, reference, sequences, temperature=1.0):
    """Every column by brute force over the whole vocabulary, with numpy."""
    rows = {name: [] for name in TOKEN_COLUMNS if name != "text"}
    for one in sequences:
        text = [*one.prompt_ids, *one.response_ids]
        both = [double_logits(folder, text).numpy() / temperature for folder in (policy, reference)]
        for position, token in enumerate(one.response_ids):
            at = len(one.prompt_ids) - 1 + position
            logp, logq = (log_softmax(z[at]) for z in both)
            p, q = np.exp(logp), np.exp(logq)
            logm = np.logaddexp(logp, logq) - math.log(2)
            found = {
                "prompt_id": one.prompt_id,
                "sample_id": one.sample_id,
                "position": position,
                "token_id": token,
                "logp_policy": logp[token],
                "logp_reference": logq[token],
                "logp_sampled": np.nan,
                "kl_policy_reference": p @ (logp - logq),
                "kl_reference_policy": q @ (logq - logp),
                "jensen_shannon": (p @ (logp - logm) + q @ (logq - logm)) / 2,
                "total_variation": np.abs(p - q).sum() / 2,
                "entropy_policy": -p @ logp,
                "entropy_reference": -q @ logq,
                "top1_policy": p.argmax(),
                "top1_reference": q.argmax(),
                "top1_probability_policy": p.max(),
                "top1_probability_reference": q.max(),
                "rank_reference": (logq > logq[token]).sum(),
            }
            for name, value in found.items():
                rows[name].append(value)
    return {name: np.array(values) for name, values in rows.items()}
