"""``kleash measure`` against a brute-force computation in float64 over the whole vocabulary."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from command_words import words
from tiny_models import DOCUMENTS, double_logits, tiny_pair, tiny_tokenizer

from kleash.cli import main
from kleash.records import Measurement
from kleash.store.measurement_summary import describe_quantiles

PROMPTS = [
    "The sea was calm",
    "She counted the birds on the wire, and then",
    "A long road",
    "When the rain stopped they opened the windows, and",
    "It is said",
]


def read(folder, kind):
    table = pq.read_table(folder / kind)
    return {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}


def brute_force(logits_p, logits_q, token):
    """Every column of one position from both models' logits, by the textbook sums, in float64."""
    p, q = torch.softmax(logits_p, -1), torch.softmax(logits_q, -1)
    logp, logq = torch.log_softmax(logits_p, -1), torch.log_softmax(logits_q, -1)
    logm = ((p + q) / 2).log()
    return {
        "logp_policy": logp[token].item(),
        "logp_reference": logq[token].item(),
        "kl_policy_reference": (p * (logp - logq)).sum().item(),
        "kl_reference_policy": (q * (logq - logp)).sum().item(),
        "jensen_shannon": ((p * (logp - logm)).sum() / 2 + (q * (logq - logm)).sum() / 2).item(),
        "total_variation": ((p - q).abs().sum() / 2).item(),
        "entropy_policy": -(p * logp).sum().item(),
        "entropy_reference": -(q * logq).sum().item(),
        "top1_policy": p.argmax().item(),
        "top1_reference": q.argmax().item(),
        "top1_probability_policy": p.max().item(),
        "top1_probability_reference": q.max().item(),
        "rank_reference": (q > q[token]).sum().item(),
    }


def check_every_column(out, policy, reference, contexts, temperature, *, on_text=False):
    """Compare the run's tokens with brute force; ``contexts`` gives what stood before each sequence."""
    tokens = read(out, "tokens")
    assert len(tokens["position"]) > 30
    acceptance = {}
    for (prompt, sample), context in contexts.items():
        rows = np.flatnonzero((tokens["prompt_id"] == prompt) & (tokens["sample_id"] == sample))
        assert len(rows)
        ids = tokens["token_id"][rows].tolist()
        assert tokens["position"][rows].tolist() == list(range(len(ids)))
        both = [double_logits(folder, [*context, *ids]) / temperature for folder in (policy, reference)]
        for place, row in enumerate(rows):
            logits = [side[len(context) + place - 1] for side in both]
            p, q = (torch.softmax(each, -1) for each in logits)
            # Speculative sampling draws x from p and accepts it with probability min(1, q(x) / p(x)).
            acceptance.setdefault(prompt, []).append((p * torch.clamp(q / p, max=1)).sum().item())
            for name, value in brute_force(*logits, ids[place]).items():
                where = (name, prompt, sample, place)
                assert tokens[name][row] == pytest.approx(value, rel=2e-4, abs=2e-5), where
    assert sum(map(len, acceptance.values())) == len(tokens["position"])
    reported = json.loads((out / "measurement.json").read_text())["per_token"]
    rate = reported["acceptance_rate"]
    sums, counts = (np.array([function(rates) for rates in acceptance.values()]) for function in (sum, len))
    mean = sums.sum() / counts.sum()
    assert 0.01 < mean < 0.99 and rate["unit"] == "probability"
    assert rate["value"] == pytest.approx(mean, abs=2e-5)
    assert rate["standard_error"] == pytest.approx(reported["total_variation"]["standard_error"], rel=1e-9)
    if not on_text:
        variance = len(sums) / (len(sums) - 1) * ((sums - mean * counts) ** 2).sum() / counts.sum() ** 2
        assert rate["standard_error"] == pytest.approx(variance**0.5, rel=1e-3)


@pytest.mark.parametrize(("architecture", "temperature"), [("llama", 1.0), ("gpt2", 0.7), ("gemma2", 1.3)])
def test_every_column_and_mean_agrees_with_float64(architecture, temperature, tmp_path):
    policy, reference = tiny_pair(tmp_path, architecture)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    out = tmp_path / "run"
    models = {"policy": policy, "reference": reference, "prompts": prompts, "temperature": temperature}
    assert main(words("measure", out=out, **models, samples_per_prompt=2, max_new_tokens=9, quiet=True)) == 0
    prompt_ids = [tiny_tokenizer()(text)["input_ids"] for text in PROMPTS]
    contexts = {(prompt, sample): prompt_ids[prompt] for prompt in range(len(PROMPTS)) for sample in (0, 1)}
    check_every_column(out, policy, reference, contexts, temperature)
    tokens, measured = read(out, "tokens"), json.loads((out / "measurement.json").read_text())
    np.testing.assert_allclose(tokens["logp_sampled"], tokens["logp_policy"], atol=1e-4)
    for name in ("kl_policy_reference", "jensen_shannon", "entropy_reference", "logp_policy"):
        mean = tokens[name].astype(float).mean()
        assert measured["per_token"][name]["value"] == pytest.approx(mean, rel=1e-9)
    u = tokens["logp_policy"].astype(float) - tokens["logp_reference"]
    exact = tokens["kl_policy_reference"].astype(float)
    for name, values in {"k1": u, "abs": abs(u), "k2": u**2 / 2, "k3": np.exp(-u) - 1 + u}.items():
        record = measured["estimators"][name]
        assert record["value"] == pytest.approx(values.mean(), rel=1e-6)
        assert record["bias"]["value"] == pytest.approx((values - exact).mean(), abs=1e-6)
        assert record["spread"] == pytest.approx((values - exact).std(), rel=1e-6)
    p, q = np.exp(tokens["logp_policy"].astype(float)), np.exp(tokens["logp_reference"].astype(float))
    assert measured["probability_change"]["mean"]["value"] == pytest.approx((p - q).mean(), rel=1e-6)
    rms = ((p - q) ** 2).mean() ** 0.5
    assert measured["probability_change"]["rms"]["value"] == pytest.approx(rms, rel=1e-6)
    assert measured["perplexity"]["policy"]["value"] == pytest.approx(np.exp(-np.log(p).mean()), rel=1e-6)
    assert measured["perplexity"]["reference"]["value"] == pytest.approx(np.exp(-np.log(q).mean()), rel=1e-6)
    assert measured["perplexity"]["ratio"]["value"] == pytest.approx(np.exp(-u.mean()), rel=1e-6)
    agreement = (tokens["top1_policy"] == tokens["top1_reference"]).mean()
    assert measured["top1_agreement"]["value"] == pytest.approx(agreement)


def test_every_token_of_a_text_is_scored_once_in_its_window(tmp_path):
    policy, reference = tiny_pair(tmp_path, "llama")
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    out = tmp_path / "run"
    models = {"policy": policy, "reference": reference, "text": source}
    assert main(words("measure", out=out, **models, window=24, stride=16, batch_tokens=64, quiet=True)) == 0
    ids = [tiny_tokenizer()(text)["input_ids"] for text in DOCUMENTS]
    tokens = read(out, "tokens")
    contexts = {}
    for document, whole in enumerate(ids):
        scored = tokens["token_id"][tokens["prompt_id"] == document].tolist()
        assert scored == whole[1:]
        start = 1
        for window in range(int(tokens["sample_id"][tokens["prompt_id"] == document].max()) + 1):
            count = int(((tokens["prompt_id"] == document) & (tokens["sample_id"] == window)).sum())
            contexts[document, window] = whole[16 * window : start]
            start += count
    check_every_column(out, policy, reference, contexts, 1.0, on_text=True)
    measured = json.loads((out / "measurement.json").read_text())
    assert measured["estimators"] == {} and measured["per_sequence"] is None
    assert "averages over tokens that the policy drew" in measured["estimators_note"]


def test_a_model_compared_with_itself_is_exactly_0(tmp_path):
    _, reference = tiny_pair(tmp_path, "gemma2")
    source = tmp_path / "text.txt"
    source.write_text("\n\n".join(DOCUMENTS))
    out = tmp_path / "run"
    assert (
        main(words("measure", policy=reference, reference=reference, text=source, out=out, quiet=True)) == 0
    )
    tokens = read(out, "tokens")
    for name in ("kl_policy_reference", "kl_reference_policy", "jensen_shannon", "total_variation"):
        assert (tokens[name] == 0).all()
    measured = json.loads((out / "measurement.json").read_text())
    assert measured["per_token"]["kl_policy_reference"]["value"] == 0
    assert measured["top1_agreement"]["value"] == 1 == measured["per_token"]["acceptance_rate"]["value"]
    by_position = [part["kl"] for part in measured["by_position"]]
    names = ("kl_policy_reference", "jensen_shannon", "total_variation", "acceptance_rate")
    numbers = [measured["per_token"][name] for name in names]
    numbers += [measured["perplexity"]["ratio"], measured["probability_change"]["rms"]]
    numbers.append(measured["top1_agreement"])
    for number in (*numbers, *by_position, *measured["quantiles"]["kl_policy_reference"].values()):
        assert number["standard_error"] == 0
        assert all(warning.startswith("rows of a head that are no tokens") for warning in number["warnings"])
        assert number["ci95"] == [number["value"]] * 2
    assert describe_quantiles(Measurement.read(out)).endswith("largest 0 nats"), "and no share of a KL of 0"
    assert "The 1 % of tokens" not in (out / "report.html").read_text()
    assert measured["per_token"]["entropy_policy"]["warnings"], "few clusters are said of what is not known"
