"""The tokens, sequences and prompts with the largest KL, against sorting all of them."""

import numpy as np

from kleash.measuring import largest_drift
from kleash.measuring.largest_drift import MAX_TEXT, MAX_TOKENS, Largest, LargestDrift, shorten_text
from kleash.records import RunFolder
from kleash.store.job_folder import RunHeader
from kleash.store.tables import SEQUENCE_COLUMNS, TOKEN_COLUMNS

SEQUENCES, LENGTH, PER_SHARD = 300, 7, 60
PROMPT = np.concatenate([np.arange(200) // 2, 100 + np.arange(100) // 4])  # of each sequence
SAMPLE = np.arange(300) - np.searchsorted(PROMPT, PROMPT)


def rows(kl, shard):
    sequence = np.arange(shard * PER_SHARD, (shard + 1) * PER_SHARD).repeat(LENGTH)
    part = kl[shard * PER_SHARD : (shard + 1) * PER_SHARD].ravel().astype(np.float32)
    return {
        "prompt_id": PROMPT[sequence],
        "sample_id": SAMPLE[sequence],
        "position": np.tile(np.arange(LENGTH), PER_SHARD),
        "kl_policy_reference": part,
        "text": [f"t{value:.3f}" for value in part],
    }


def test_top_entries_do_not_depend_on_the_order():
    """Of equal KLs the first of the run stay, though its shards are scored in any order."""
    draw = np.random.default_rng(0)
    kl, ids = draw.integers(0, 20, 1000).astype(float), np.arange(1000)
    expected = sorted(zip(-kl, ids // 3, ids % 3, strict=True))[:10]
    largest = Largest(10)
    for rows in np.split(draw.permutation(1000), 50):
        largest.add({"kl": kl[rows], "prompt_id": ids[rows] // 3, "sample_id": ids[rows] % 3})
    assert [(-row.kl, row.prompt_id, row.sample_id) for row in largest.drifted()] == expected


def test_largest_tokens_sequences_and_prompts_equal_a_full_sort(tmp_path, monkeypatch):
    kl = np.random.default_rng(0).lognormal(-2, 2, (SEQUENCES, LENGTH)).astype(np.float32)
    largest = LargestDrift()
    folder = RunFolder(tmp_path)
    header = RunHeader(kleash="1", settings={}, source_sha256="", fingerprints={})
    with folder.writing(header, resume=False):
        for shard in range(SEQUENCES // PER_SHARD):
            part = rows(kl, shard)
            largest.add(part)
            tokens = {name: part.get(name, np.zeros(PER_SHARD * LENGTH)) for name in TOKEN_COLUMNS}
            sequences = dict.fromkeys(SEQUENCE_COLUMNS, [""] * PER_SHARD)
            ids = np.arange(shard * PER_SHARD, (shard + 1) * PER_SHARD)
            sequences |= {"prompt_id": PROMPT[ids], "sample_id": SAMPLE[ids], "tokens": [LENGTH] * PER_SHARD}
            sequences["response"] = [" read on"] * PER_SHARD
            sequences["prompt"] = [f"prompt {number}" for number in PROMPT[ids]]
            folder.write_shard(shard, tokens, sequences)
    flat = np.sort(kl.ravel())[::-1]
    np.testing.assert_array_equal(
        [each.kl for each in largest.tokens.drifted()], flat[:MAX_TOKENS].astype(float)
    )
    first = largest.tokens.drifted()[0]
    row, column = np.unravel_index(kl.argmax(), kl.shape)
    assert (first.prompt_id, first.sample_id, first.position) == (PROMPT[row], SAMPLE[row], column)
    assert first.text == f"t{kl.max():.3f}"
    order = np.argsort(-kl.astype(float).sum(1))
    sequences = [(each.prompt_id, each.sample_id) for each in largest.sequences.drifted()]
    assert sequences == [(PROMPT[n], SAMPLE[n]) for n in order[:50]]
    prompts = largest.worst_prompts(folder, on_text=False)
    means = np.array([kl[np.isin(PROMPT, number)].astype(float).mean() for number in range(125)])
    assert [each.prompt_id for each in prompts] == np.argsort(-means).tolist()
    top = prompts[0]
    mine = kl[np.isin(PROMPT, top.prompt_id)].astype(float)
    assert (top.sequences, top.tokens, top.prompt) == (len(mine), mine.size, f"prompt {top.prompt_id}")
    np.testing.assert_allclose(
        [top.kl_per_token, top.kl_per_sequence, top.kl_max],
        [mine.mean(), mine.sum() / len(mine), mine.max()],
        rtol=1e-6,
    )
    monkeypatch.setattr(largest_drift, "MAX_PROMPTS", 3)
    assert largest.worst_prompts(folder, on_text=False) == prompts[:3]
    documents = largest.worst_prompts(folder, on_text=True)
    assert documents[0].prompt == f"prompt {top.prompt_id} read on"


def test_infinite_kl_ranks_first_and_nan_last_and_long_prompts_are_cut():
    kl = np.array([[0.5, np.inf, np.nan, 0.1, 0.2, 0.3, 0.4]])
    largest = LargestDrift()
    largest.add({name: values[:LENGTH] for name, values in rows(np.repeat(kl, PER_SHARD, 0), 0).items()})
    kls = [each.kl for each in largest.tokens.drifted()]
    assert kls[:2] == [np.inf, 0.5] and kls[-1] == -np.inf
    assert shorten_text("a" * MAX_TEXT) == "a" * MAX_TEXT
    assert shorten_text("a" * (MAX_TEXT + 1)) == "a" * (MAX_TEXT - 1) + "…"
