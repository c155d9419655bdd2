"""A measurement in a model card: metadata that the hub reads, and a section, whatever the names are."""

import math
from dataclasses import replace

import pytest
import yaml
from huggingface_hub.repocard_data import (
    ModelCardData,
    eval_results_to_model_index,
    model_index_to_eval_results,
)

from kleash.records import Number
from kleash.reports.text_formats import card_section, model_card, published_name
from kleash.store.measurement import ModelRecord

YAML = ("a: b\n- c", "--- ", "'quoted' \"twice\"", "&anchor *alias !tag", "yes", "1e3", "# comment")
MARKDOWN = ("{{ jinja }} %", "`" * 4 + "<script>|", "x\n```\n<script>")
UNICODE = ("line\u2028break \x00\x1b \u202eevil", "\udc80undecodable", "👩‍👩‍👧 שלום")


def named(measurement, policy, reference="base/", **job):
    models = {
        role: ModelRecord(**{**vars(model), "path": path})
        for (role, model), path in zip(measurement.models.items(), (policy, reference), strict=True)
    }
    job = {"policy": policy, "reference": reference, **job}
    return replace(measurement, models=models, job=job)


def metadata_of(card):
    """The metadata of a card, as the hub splits them off."""
    first, block, rest = card.split("---\n", 2)
    assert first == "" and rest.startswith("\n## ")
    return yaml.safe_load(block)


def test_the_hub_reads_every_metric_with_its_interval(run):
    measurement = named(run[1], "runs/7/tuned/", "org/base", text="data/corpus.txt")
    data = metadata_of(model_card(measurement))
    name, results = model_index_to_eval_results(data["model-index"])
    assert name == "tuned"
    by_type = {result.metric_type: result for result in results}
    for statistic, number in measurement.statistics().items():
        if statistic in by_type:
            result, args = by_type[statistic], by_type[statistic].metric_args
            assert (result.metric_value, args["standard_error"]) == (number.value, number.standard_error)
            assert (args["ci95_low"], args["ci95_high"]) == number.ci95
            assert (args["reference"], args["tokens"], args["clusters"]) == ("org/base", 5805, 40)
    expected = {"kl_policy_reference", "kl_reference_policy", "top1_agreement", "perplexity_ratio"}
    assert expected <= set(by_type)
    kl = by_type["kl_policy_reference"]
    assert (kl.task_type, kl.dataset_type) == ("text-generation", "corpus.txt")
    assert kl.dataset_args == {"sha256": measurement.source_sha256}
    assert eval_results_to_model_index(name, results) == data["model-index"]
    card = ModelCardData(model_name=name, eval_results=results)
    assert card.to_dict()["model-index"] == data["model-index"]


@pytest.mark.parametrize("name", [*YAML, *MARKDOWN, *UNICODE])
def test_metadata_are_valid_for_any_name(name, run):
    card = model_card(named(run[1], name, name, prompts=name, split=name))
    data = metadata_of(card)
    text = name.encode("utf-8", "replace").decode().replace("?", "\ufffd") if "\udc80" in name else name
    assert data["model-index"][0]["name"] == published_name(text)
    dataset = data["model-index"][0]["results"][0]["dataset"]
    assert (dataset["type"], dataset["split"]) == (published_name(text), text)
    card.encode()
    renderer = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    html = renderer.render(card.split("---\n", 2)[2])
    assert "<script" not in html and html.count("<pre>") == 1


def test_a_section_says_what_was_measured_against_what(run):
    card = model_card(named(run[1], "runs/7/tuned", "org/base", text="data/corpus.txt"))
    assert (
        "`tuned` was measured against `org/base` on the texts of `corpus.txt`: KL(policy ‖ reference) is "
        "0.235 nats per token (95 % interval 0.207 to 0.264), over 5,805 tokens in 40 independent clusters."
        in card
    )
    assert "| KL(policy ‖ reference) | 0.235 | 0.207 to 0.264 | 0.014 | nats |" in card
    assert (
        "```bash\nkleash measure --policy runs/7/tuned --reference org/base --text data/corpus.txt\n```"
        in card
    )
    assert "- Only 40 clusters: the interval leans on few prompts." in card
    text = "over the prefixes of the text data/corpus.txt, runs/7/tuned"
    section = card_section(
        replace(named(run[1], "runs/7/tuned", text="data/corpus.txt"), estimand=text, warnings=(text,))
    )
    assert "Over the prefixes of the text corpus.txt, tuned." in section
    assert "- Over the prefixes of the text corpus.txt, tuned." in section
    assert section.count("data/") == section.count("runs/") == 1  # in the command


def test_bounds_are_named_as_bounds(run):
    low, high = (
        Number(value=value, unit="nats", standard_error=0.01, ci95=(value - 0.02, value + 0.02))
        for value in (0.1, 0.4)
    )
    bounds = {"kl_policy_reference_lower": low, "kl_policy_reference_upper": high}
    card = model_card(replace(named(run[1], "http://host/v1"), per_token=bounds, per_sequence=None))
    assert "KL(policy ‖ reference), lower bound is 0.100 nats per token" in card
    assert "KL(policy ‖ reference), upper bound 0.400 nats per token" in card
    (result,) = metadata_of(card)["model-index"][0]["results"]
    types = [metric["type"] for metric in result["metrics"]]
    assert "kl_policy_reference_lower" in types and "kl_policy_reference" not in types


def test_what_is_unknown_is_left_out_and_infinity_stays(run):
    unknown = Number(value=math.nan, unit="nats", standard_error=math.nan, ci95=(math.nan, math.nan))
    infinite = replace(unknown, value=math.inf)
    per_token = {**run[1].per_token, "jensen_shannon": unknown, "kl_reference_policy": infinite}
    data = metadata_of(model_card(replace(run[1], per_token=per_token)))
    metrics = {metric["type"]: metric for metric in data["model-index"][0]["results"][0]["metrics"]}
    assert "jensen_shannon" not in metrics
    assert metrics["kl_reference_policy"]["value"] == math.inf
    assert not {"standard_error", "ci95_low", "ci95_high"} & set(metrics["kl_reference_policy"]["args"])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/model", "org/model"),
        ("org/q4.gguf", "q4.gguf"),
        ("data/prompts.jsonl.gz", "prompts.jsonl.gz"),
        ("/home/someone/secret/tuned/", "tuned"),
        ("C:\\models\\tuned", "C:\\models\\tuned"),
        ("../base", "base"),
        ("base", "base"),
        ("/", "/"),
        ("shipped:policy", "shipped:policy"),
        ("o" * 300 + "/" + "m" * 300, "m" * 300),
    ],
)
def test_a_path_is_published_by_its_last_part(path, name):
    assert published_name(path) == name


def test_a_folder_that_looks_like_a_name_on_the_hub_is_a_folder(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert published_name("org/model") == "model"
