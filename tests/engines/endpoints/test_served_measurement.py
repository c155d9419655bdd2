"""Measurements of a policy behind a server: the bounds hold at every token, and nothing is known that is not."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from command_words import words
from transformers import AutoModelForCausalLM, AutoTokenizer
from two_threads import measured_twice

from kleash.cli import main
from kleash.errors import OptionError
from kleash.jobs import MeasureJob
from kleash.measuring import compare, measure
from kleash.measuring.cluster_sums import LISTED_AND_SAMPLED, SumKey, token_quantities
from kleash.models import Model
from kleash.reports.gate_verdicts import gate_of_measurement
from kleash.reports.measurement import write_report
from kleash.shipped import shipped_folder
from kleash.store import Measurement
from kleash.store.measurement_summary import left_out_sentences
from kleash.store.statistics import DIVERGENCE_COLUMNS, known_statistics
from kleash.store.tables import BOUND_COLUMNS

TEXT = """She was not unhappy, and had the evening been fine she would have gone out.

Mr. Weston, who had been there before dinner, said that it would rain; and it did.

"I never saw such a house," cried her sister, "nor so many windows in one room!"
"""
KEY = "sk-of-the-policy"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def distributions():
    """Next-token log-probabilities of both shipped models in float64, by transformers alone."""

    def of(name):
        network = AutoModelForCausalLM.from_pretrained(shipped_folder(name), dtype=torch.float64).eval()

        def log_probabilities(ids):
            with torch.inference_mode():
                return torch.log_softmax(network(torch.tensor([ids])).logits[0], dim=-1)

        return log_probabilities

    return {name: of(name) for name in ("policy", "reference")}


def exact_divergences(distributions, path):
    """The divergences at every token of the documents, by their definitions."""
    tokenizer = AutoTokenizer.from_pretrained(shipped_folder("reference"))
    rows = {}
    for document in path.read_text().strip().split("\n\n"):
        ids = tokenizer(document)["input_ids"]
        p, q = (distributions[name](ids)[:-1] for name in ("policy", "reference"))
        m = torch.log((p.exp() + q.exp()) / 2)

        def kl(first, second):
            return (first.exp() * (first - second)).sum(-1)

        values = {
            "kl_policy_reference": kl(p, q),
            "kl_reference_policy": kl(q, p),
            "jensen_shannon": (kl(p, m) + kl(q, m)) / 2,
            "total_variation": (p.exp() - q.exp()).abs().sum(-1) / 2,
        }
        tokens = torch.tensor(ids[1:])
        for role, logp in (("policy", p), ("reference", q)):
            values[f"logp_{role}"] = logp.gather(-1, tokens[:, None])[:, 0]
            values[f"top1_{role}"], values[f"top1_probability_{role}"] = logp.argmax(-1), logp.exp().amax(-1)
        values["rank_reference"] = (q > values["logp_reference"][:, None]).sum(-1)
        values["position"] = torch.arange(len(tokens))
        for name, column in values.items():
            rows.setdefault(name, []).append(column)
    return {name: torch.cat(columns).numpy() for name, columns in rows.items()}


def tokens_of(folder):
    table = parquet.read_table(folder / "tokens", partitioning=None)
    return {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}


def assert_bounds_hold(tokens, exact):
    for name in ("kl_policy_reference", "kl_reference_policy", "jensen_shannon", "total_variation"):
        lower, upper = tokens[f"{name}_lower"], tokens[f"{name}_upper"]
        assert (lower <= exact[name]).all() and (exact[name] <= upper).all(), name
        assert (lower > 0.3 * exact[name]).mean() > 0.5, f"{name}: the lower bound is not empty"
    for name in exact.keys() - set(DIVERGENCE_COLUMNS):
        found = tokens[name].astype(float)
        is_known = ~np.isnan(found)
        assert is_known.all() or (name == "rank_reference" and is_known.mean() > 0.5), (
            "those of listed tokens"
        )
        np.testing.assert_allclose(found[is_known], exact[name][is_known], atol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def runs(server, text, tmp_path_factory):
    """A run with each dialect, one with the server as reference, and one with both models loaded."""
    folder = tmp_path_factory.mktemp("runs")
    jobs = {
        name: {"policy": f"{server}/{name}/none/v1", "reference": "shipped:reference"}
        for name in ("vllm", "sglang")
    }
    jobs["reference"] = {"policy": "shipped:reference", "reference": f"{server}/vllm/none/v1/"}
    jobs["local"] = {"policy": "shipped:policy", "reference": "shipped:reference"}
    for name, options in jobs.items():
        measure(text=text, out=folder / name, quiet=True, **options)
    return {name: folder / name for name in jobs}


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_bounds_hold_the_exact_divergences_at_every_token(runs, text, distributions, name):
    exact, tokens = exact_divergences(distributions, text), tokens_of(runs[name])
    assert_bounds_hold(tokens, exact)
    assert np.isinf(tokens["kl_reference_policy_upper"]).all()
    assert np.isfinite(tokens["kl_policy_reference_upper"]).all()
    for column in ("kl_policy_reference", "kl_reference_policy", "total_variation", "entropy_policy"):
        assert np.isnan(tokens[column]).all()


def test_a_reference_behind_a_server_has_the_upper_bound_in_the_other_direction(runs, text, distributions):
    turned = {"policy": distributions["reference"], "reference": distributions["policy"]}
    exact = exact_divergences(turned, text)
    tokens = tokens_of(runs["reference"])
    assert_bounds_hold(tokens, exact)
    assert np.isinf(tokens["kl_policy_reference_upper"]).all()
    assert np.isfinite(tokens["kl_reference_policy_upper"]).all()
    measurement = Measurement.read(runs["reference"])
    assert measurement.noise_floor is None
    assert any("the reference is behind a server" in warning for warning in measurement.warnings)


def test_what_is_unknown_is_left_out_with_its_reason(runs):
    measurement, local = Measurement.read(runs["vllm"]), Measurement.read(runs["local"])
    bounds = {name for name in BOUND_COLUMNS if name.endswith(("_lower", "_upper"))}
    assert set(measurement.per_token) >= bounds
    for name in ("kl_policy_reference", "total_variation", "acceptance_rate", "entropy_policy"):
        assert name not in measurement.per_token
        assert "lists 20 tokens" in measurement.left_out[name]
    sentences = left_out_sentences(measurement)
    assert "_" not in "".join(sentences) and "tokens with the largest KL" in sentences[1]
    for name in ("entropy_reference", "logp_policy", "logp_reference"):
        assert measurement.per_token[name].value == pytest.approx(local.per_token[name].value, abs=1e-5)
    assert measurement.top1_agreement.value == pytest.approx(local.top1_agreement.value, abs=1e-9)
    assert measurement.perplexity["policy"].value == pytest.approx(local.perplexity["policy"].value, rel=1e-5)
    upper = measurement.per_token["kl_reference_policy_upper"]
    (reason,) = upper.warnings
    assert upper.value == math.inf and reason.startswith("no upper bound: it is not known how unlikely some")
    assert "upper bound: inf nats (95 % interval unknown)" in measurement.summary().splitlines()[0]
    assert measurement.models["policy"].dtype == "unknown" and measurement.models["policy"].parameters is None
    kl = local.per_token["kl_policy_reference"].value
    low, high = (measurement.per_token[f"kl_policy_reference_{end}"].value for end in ("lower", "upper"))
    assert low < kl < high


def test_a_gate_takes_the_range_of_both_bounds(runs):
    measurement = Measurement.read(runs["vllm"])
    by_default = gate_of_measurement(measurement, at_most=1e9)
    assert (by_default.quantity, by_default.ci95[1]) == ("per_token.kl_reference_policy", math.inf)
    name = "kl_policy_reference"
    lower, upper = (measurement.per_token[f"{name}_{end}"] for end in ("lower", "upper"))
    gate = gate_of_measurement(measurement, lower.ci95[0] / 2, name)
    assert gate.ci95 == (lower.ci95[0], upper.ci95[1]) and gate.verdict == "failed"
    assert gate_of_measurement(measurement, 2 * upper.ci95[1], name).verdict == "undecided"  # 3 clusters
    many = replace(measurement, counts=replace(measurement.counts, clusters=30))
    assert gate_of_measurement(many, 2 * upper.ci95[1], name).verdict == "passed"
    assert gate_of_measurement(many, 0.9 * upper.ci95[1], name).verdict == "undecided"
    served_reference = Measurement.read(runs["reference"])
    assert gate_of_measurement(served_reference, 1e9, name).ci95[1] == math.inf


def test_report_summary_and_comparison_show_the_bounds(runs, capsys):
    page = write_report(runs["vllm"]).read_text()
    assert "KL(reference ‖ policy), lower bound per token" in page and "Upper bound" in page
    assert "lists 20 tokens at each position and not its whole distribution" in page
    comparison = compare([runs["local"], runs["vllm"]])
    assert "kl_policy_reference" not in comparison.differences[0].differences
    assert abs(comparison.differences[0].differences["perplexity_policy"].value) < 1e-3
    assert "kl_policy_reference_lower" in comparison.runs[1].numbers
    assert not any("reference is" in warning for warning in comparison.warnings)
    (warning,) = compare([runs["local"], runs["reference"]]).warnings
    assert "may have, behind a server, another reference" in warning
    page = str(runs["vllm"].parent / "comparison.html")
    assert main(["compare", str(runs["vllm"]), str(runs["local"]), "--out", page]) == 0
    assert main(["report", str(runs["vllm"])]) == 0
    assert "unknown" in capsys.readouterr().out


def drawn_responses(path, distributions):
    """Responses that the policy draws, as token ids."""
    generator = torch.Generator().manual_seed(0)
    lines = []
    for prompt in ([0, 40, 50], [0, 60, 70, 80], [0, 90, 100]):
        ids, drawn = list(prompt), []
        for _ in range(12):
            logp = distributions["policy"](ids)[-1]
            ids.append(int(torch.multinomial(logp.exp(), 1, generator=generator)))
            drawn.append(float(logp[ids[-1]]))
        record = {"prompt_token_ids": prompt, "response_token_ids": ids[len(prompt) :]}
        lines.append(json.dumps(record | {"logprobs": drawn}))
    path.write_text("\n".join(lines))
    return path


def test_responses_have_sampled_estimates(server, distributions, tmp_path):
    responses = str(drawn_responses(tmp_path / "responses.jsonl", distributions))
    options = {"responses": responses, "quiet": True}
    served = measure(policy=f"{server}/vllm/none/v1", out=tmp_path / "served", **options)
    local = measure(out=tmp_path / "local", **options)
    assert set(served.estimators) == {*local.estimators, LISTED_AND_SAMPLED}
    for name, record in local.estimators.items():
        assert served.estimators[name].value == pytest.approx(record.value, abs=1e-5)
        assert served.estimators[name].ci95 == pytest.approx(record.ci95, abs=1e-4)
        assert served.estimators[name].bias is None
    assert served.per_sequence is None and "per_sequence" in served.left_out
    page = write_report(tmp_path / "served").read_text()
    assert "listed_and_sampled" in page


@pytest.mark.parametrize(("least", "warns"), [(3, True), (2559, False)])
def test_listed_rows_that_are_no_tokens_are_named(
    server, text, distributions, tmp_path, monkeypatch, least, warns
):
    """With the rows from ``least`` on taken for rows that are no tokens."""
    monkeypatch.setattr(Model, "padding_mask", lambda model: torch.arange(model.vocab_size) >= least)
    options = {"text": str(text), "limit": 1, "quiet": True}
    measurement = measure(policy=f"{server}/vllm/none/v1", out=tmp_path / "run", **options)
    ids = AutoTokenizer.from_pretrained(shipped_folder("reference"))(TEXT.partition("\n")[0])["input_ids"]
    reference = float(distributions["reference"](ids)[:-1, least:].exp().sum(-1).mean())
    (note,) = [note for note in measurement.notes if "rows of a head that are no tokens" in note]
    assert f"and {reference:.3g} of the reference's probability; {len(ids) - 1 if warns else 0} of" in note
    shares = [number for number in measurement.per_token if number.startswith("padding_probability")]
    assert len(shares) == 2
    warnings = [
        warning for warning in measurement.warnings if "the bounds of the divergences are over all" in warning
    ]
    assert len(warnings) == warns
    assert set(warnings) <= set(measurement.per_token["kl_policy_reference_lower"].warnings)


def test_the_listed_terms_with_a_sampled_tail_are_unbiased():
    generator = torch.Generator().manual_seed(3)
    logp, logq = torch.log_softmax(2 * torch.randn(2, 50, generator=generator, dtype=torch.float64), -1)
    mu = torch.log_softmax(torch.randn(50, generator=generator, dtype=torch.float64), -1)
    exact = float((logp.exp() * (logp - logq)).sum())
    listed = logp.topk(5).indices
    of_listed = float((logp.exp() * (logp - logq))[listed].sum())
    is_listed = torch.isin(torch.arange(50), listed)
    columns = {name: np.zeros(50) for name in BOUND_COLUMNS} | {
        "logp_policy": logp.numpy(),
        "logp_reference": logq.numpy(),
        "logp_sampled": mu.numpy(),
        "kl_of_listed": np.full(50, of_listed),
        "token_is_listed": is_listed.double().numpy(),
        **{name: np.zeros(50) for name in ("top1_policy", "top1_reference", "entropy_reference")},
    }
    for weighting, drawn_from in (("unweighted", logp), ("importance", mu)):
        quantities = token_quantities(
            columns, weighting, known_statistics(columns, [*DIVERGENCE_COLUMNS, "entropy_policy"])
        )
        estimates = quantities[SumKey(LISTED_AND_SAMPLED)]
        assert float((drawn_from.exp().numpy() * estimates).sum()) == pytest.approx(exact, abs=1e-12)


def test_an_interrupted_run_goes_on_after_its_last_shard(server, text, runs, tmp_path, capsys):
    words = ["measure", "--policy", f"{server}/vllm/later/v1", "--reference", "shipped:reference"]
    words += ["--text", str(text), "--out", str(tmp_path / "run"), "--batch-tokens", "8", "--quiet"]
    options = ["--endpoint-concurrency", "1", "--endpoint-retries", "0"]
    assert main([*words, *options]) == 2
    error = capsys.readouterr().err
    assert "answers 500" in error and "go on with --resume" in error and error.count("\n") == 1
    finished = sorted((tmp_path / "run" / "sequences").glob("*.parquet"))
    assert len(finished) == 2
    before = [path.read_bytes() for path in finished]
    assert main([*words, "--resume", "--endpoint-concurrency", "3"]) == 0
    assert [path.read_bytes() for path in finished] == before
    resumed, whole = Measurement.read(tmp_path / "run"), Measurement.read(runs["vllm"])
    assert resumed.counts.tokens == whole.counts.tokens
    for name, number in whole.per_token.items():
        assert resumed.per_token[name].value == pytest.approx(number.value, abs=1e-5)
    words[2] = f"{server}/sglang/none/v1"
    assert main([*words, "--resume"]) == 2
    error = capsys.readouterr().err
    assert "holds another run: " in error and "--policy was" in error and "was 'vLLM: policy' and is" in error


def test_a_run_is_not_resumed_with_another_model_of_the_same_name(server, text, tmp_path, capsys):
    """As of a server that a training run updates, or that was started again with another checkpoint."""
    words = ["measure", "--policy", f"{server}/vllm/retrained/v1", "--reference", "shipped:reference"]
    words += ["--text", str(text), "--out", str(tmp_path / "run"), "--batch-tokens", "8", "--quiet"]
    assert main([*words, "--endpoint-concurrency", "1", "--endpoint-retries", "0"]) == 2
    capsys.readouterr()
    assert main([*words, "--resume"]) == 2
    error = capsys.readouterr().err
    assert "holds another run: the server of the policy serves another model" in error


def test_windows_leave_room_for_the_token_that_a_server_generates(server, text, tmp_path):
    path = tmp_path / "one.txt"
    path.write_text(text.read_text().replace("\n\n", "\n"))
    job = MeasureJob(policy=f"{server}/vllm/full/v1", text=str(path), out=str(tmp_path / "run"), quiet=True)
    counts = measure(job).counts
    assert counts.prompts == 1 and counts.sequences == 2, "cut into windows of 38 tokens and the next"


@pytest.mark.filterwarnings("ignore")  # filters belong to the process, and processes are threads here
def test_several_processes_measure_what_one_measures(server, text, tmp_path):
    models = {"policy": f"{server}/vllm/none/v1", "reference": "shipped:reference"}
    jobs = {
        name: MeasureJob(**models, text=str(text), batch_tokens=8, out=str(tmp_path / name))
        for name in ("alone", "shared")
    }
    alone = measure(jobs["alone"])
    assert alone.counts.shards == 3
    for measured, _ in measured_twice(jobs["shared"]):
        assert repr(measured.per_token) == repr(alone.per_token), "NaN is no equal of itself"
        assert measured.left_out == alone.left_out


def test_the_key_is_sent_and_written_nowhere(server, seen, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KLEASH_POLICY_API_KEY", KEY)
    options = {"policy": f"{server}/vllm/none/v1", "text": text, "out": tmp_path / "run"}
    assert main(words("measure", **options, endpoint_concurrency=2)) == 0
    captured = capsys.readouterr()
    assert KEY not in captured.out + captured.err
    assert f"Bearer {KEY}" in seen()["keys"]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": "x.jsonl"}, "draw responses with its own client first"),
        ({"text": "x", "reference": "https://there/v1"}, "both behind servers"),
        ({"text": "x", "temperature": 0.7}, "servers give log-probabilities of prompts at 1"),
        ({"text": "x", "reference_cache": "c"}, "--reference-cache holds a loaded reference's hidden states"),
        ({"text": "x", "until_relative_error": 0.1}, "--until-relative-error needs the exact KL"),
        ({"text": "x", "reference_model": "r"}, "--reference-model is a model's name on a server"),
        ({"text": "x", "top_logprobs": 0}, "--top-logprobs must be at least 1"),
        ({"text": "x", "endpoint_timeout": math.nan}, "--endpoint-timeout must be a number above 0"),
        ({"text": "x", "endpoint_retries": -1}, "--endpoint-retries must be at least 0"),
    ],
)
def test_options_that_a_server_cannot_meet(options, message):
    with pytest.raises(OptionError, match=message):
        MeasureJob(policy="http://127.0.0.1:1/v1", **options)


@pytest.mark.peers("trl")
def test_a_server_is_named_as_such_where_a_model_has_to_be_loaded(tmp_path, capsys):
    rollout = {"prompt_token_ids": [1], "response_token_ids": [2]}
    rollout |= {"trainer_logprobs": [-1], "engine_logprobs": [-1]}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(rollout))
    out, server, prompts = tmp_path / "out", "http://127.0.0.1:1/v1", "shipped:prompts"
    for line in (
        words("doctor", tmp_path / "rollouts.jsonl", policy=server, reference="shipped:reference"),
        words("train", "rloo", policy=server, prompts=prompts, reward="math.fsum", out=out),
        words("train", "distill", policy="shipped:policy", teacher=server, prompts=prompts, out=out),
        words("cache", reference=server, text="shipped:text", out=out),
    ):
        assert main(line) == 2
        error = capsys.readouterr().err
        assert "server" in error and "name" in error and error.count("\n") == 1, error


def test_options_of_servers_without_one_do_nothing():
    job = MeasureJob(top_logprobs=5, tokenizer="t")
    assert "--top-logprobs does nothing without a server" in job.without_effect()
    assert "top_logprobs" not in job.settings()
    served = MeasureJob(policy="http://127.0.0.1:1/v1", text="x", policy_model="p", endpoint_retries=1)
    assert served.without_effect() == ()
    assert "top_logprobs" in served.settings() and "endpoint_retries" not in served.settings()
