"""Every output says how much probability rows that are no tokens have, and the KL with and without them."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from scipy.special import log_softmax, rel_entr
from tiny_models import double_logits, save_tiny, tiny_tokenizer

from kleash.measuring import cache_reference, measure, sweep
from kleash.records import CacheJob, RunFolder
from kleash.reports.text_formats import card_section
from kleash.store.summary import summarize

TEXT = "The sea was calm and the boat went out before the sun had come up."
ROWS = "rows of a head that are no tokens have"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A reference of 320 rows for 300 tokens, a policy that differs in the other 20, and one without them."""
    root = tmp_path_factory.mktemp("padding")
    reference = save_tiny(root / "reference")
    weights = load_file(reference / "model.safetensors")
    narrow = shutil.copytree(reference, root / "narrow")
    cut = {name: weight[:300].clone() if len(weight) == 320 else weight for name, weight in weights.items()}
    save_file(cut, narrow / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    policy = shutil.copytree(reference, root / "policy")
    weights["lm_head.weight"][300:] *= 2
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    text = root / "text.txt"
    text.write_text(TEXT)
    return {"reference": reference, "policy": policy, "narrow": narrow, "text": text, "root": root}


@pytest.fixture(scope="module")
def expected(models):
    """Means over the text's tokens, in float64."""
    ids = tiny_tokenizer()(TEXT)["input_ids"]
    p, q = (
        np.exp(log_softmax(double_logits(models[name], ids).numpy()[:-1], axis=-1))
        for name in ("policy", "reference")
    )
    return {
        "policy": p[:, 300:].sum(-1).mean(), "reference": q[:, 300:].sum(-1).mean(),
        "forward": rel_entr(p, q).sum(-1).mean(), "reverse": rel_entr(q, p).sum(-1).mean(),
    }  # fmt: skip


def both(models):
    return {role: models[role] for role in ("policy", "reference")}


def test_a_measurement_has_both_numbers_everywhere(models, expected):
    measurement = measure(**both(models), text=models["text"], out=models["root"] / "run")
    numbers = measurement.statistics()
    for role in ("policy", "reference"):
        assert numbers[f"padding_probability_{role}"].value == pytest.approx(expected[role], rel=1e-5)
    for name, value in (("kl_policy_reference", "forward"), ("kl_reference_policy", "reverse")):
        assert numbers[name].value == pytest.approx(expected[value], rel=1e-5)
        assert numbers[f"{name}_over_rows"].value == numbers[name].value
        assert numbers[f"{name}_over_tokens"].value == pytest.approx(0, abs=1e-5)
        assert any("over the tokens" in warning for warning in numbers[name].warnings)
    note = (
        f"{ROWS} {expected['policy']:.3g} of the policy's and {expected['reference']:.3g} of the reference's"
    )
    warning = f"is {expected['forward']:.4g} over all rows and"
    assert any(note in each for each in measurement.notes)
    (found,) = (each for each in measurement.warnings if ROWS in each)
    assert note in found and warning in found
    assert "all 320 rows of the heads, of which 20 are no tokens" in measurement.estimand
    summary = summarize(measurement)
    assert any(label == "note" and note in text for label, text in summary.facts)
    assert found in summary.warnings
    page = (models["root"] / "run" / "report.html").read_text()
    assert card_section(measurement).count(f"R{note[1:]}") == 2
    assert f"ows of a head that are no tokens have {expected['policy']:.3g} of the policy" in page


def test_generation_says_how_many_draws_are_no_tokens(models):
    out = models["root"] / "drawn"
    sampling = {"samples_per_prompt": 20, "max_new_tokens": 8}
    measurement = measure(**both(models), prompts=models["text"], out=out, **sampling)
    ids = np.concatenate([part["token_id"] for part in RunFolder(out).parts("tokens", ["token_id"])])
    drawn = int((ids >= 300).sum())
    assert drawn > 0
    (note,) = (each for each in measurement.notes if ROWS in each)
    assert f"; {drawn} of the {len(ids):,} scored tokens are such rows" in note


def test_a_cache_and_a_sweep_say_it_too(models, expected):
    root = models["root"]
    candidates = (str(models["policy"]), str(models["narrow"]))
    options = {"reference": models["reference"], "text": models["text"]}
    result = sweep(candidates=candidates, out=root / "sweep", **options)
    stored = json.loads((root / "sweep" / "sweep.json").read_text())
    first, second = stored["candidates"]
    note = (
        f"{ROWS} {expected['policy']:.3g} of the policy's and {expected['reference']:.3g} of the reference's"
    )
    assert any(note in each for each in first["notes"]) and any(note in each for each in first["warnings"])
    assert any(f"{ROWS} 0 of the policy's" in each for each in second["notes"])
    (cut,) = (each for each in second["warnings"] if ROWS in each)
    over_rows = -np.log1p(-expected["reference"])
    assert f"KL(reference ‖ policy) is inf over all rows and {0:.4g}" in cut
    found = second["numbers"]["kl_policy_reference_over_rows"]["value"]
    assert found >= over_rows and found == pytest.approx(over_rows, rel=0.2)  # a mean of logs of the rest
    summary = summarize(result)
    assert any(ROWS in text for _, text in summary.facts) and any(ROWS in each for each in summary.warnings)
    contents = cache_reference(
        CacheJob(reference=str(models["policy"]), text=str(models["text"]), out=str(root / "cache"))
    )
    assert any(ROWS in each and "on the tokens of the noise floor" in each for each in contents.notes)
    assert "the reference's head has 320 rows for 300 tokens" in contents.notes


@pytest.mark.parametrize("base", ["narrow", "reference"])
def test_base_logits_say_it_too(models, base):
    root = models["root"]
    text = root / "long.txt"
    text.write_text(f"{TEXT} " * 12)
    path = root / f"{base}.kld"
    options = {"reference": str(models[base]), "text": str(text), "window": 32, "limit": 3}
    written = cache_reference(CacheJob(format="llama.cpp", out=str(path), **options))
    assert any(ROWS in note for note in written.notes) == (base == "reference")
    result = measure(reference_cache=path, policy=models["policy"], out=root / f"against-{base}")
    ids = [*tiny_tokenizer()(f"{TEXT} " * 12, add_special_tokens=False)["input_ids"]]
    ids = np.array([0, *ids])[: 32 * 3].reshape(3, 32)

    def probabilities(name):
        rows = [double_logits(models[name], [0, *row[1:].tolist()]).numpy()[16:31] for row in ids]
        return np.exp(log_softmax(np.concatenate(rows), axis=-1))

    p, q = probabilities(base), probabilities("policy")
    p = np.pad(p, ((0, 0), (0, 320 - p.shape[1])))
    of_base, of_policy = (x[:, 300:].sum(-1).mean() for x in (p, q))
    (note,) = (each for each in result.notes if ROWS in each)
    assert f"{of_policy:.3g} of the policy's and {of_base:.3g} of the reference's" in note
    warnings = {each for number in result.per_token.values() for each in number.warnings if ROWS in each}
    (warning,) = warnings
    low, high = (
        warning.split("KL(reference ‖ policy) is between ")[1].split(" over all rows")[0].split(" and ")
    )
    exact = rel_entr(p, q).sum(-1).mean()
    assert float(low) * (1 - 1e-3) <= exact <= float(high) * (1 + 1e-3)
    tokens = warning.split("over all rows and between ")[1].split(" over the tokens")[0].split(" and ")
    assert float(tokens[0]) < 1e-6 and float(tokens[1]) < 1e-4
    assert ("KL(policy ‖ reference) is between inf" in warning) == (base == "narrow")
    assert any(ROWS in each for each in summarize(result).warnings)
