"""Measurements from Python: options as keywords, sources in memory, and models in memory."""

import inspect
import json
import random
from dataclasses import fields
from itertools import permutations
from types import SimpleNamespace
from typing import get_type_hints

import pyarrow.parquet as pq
import pytest
import torch
from beartype.door import is_subhint
from peft import PeftModel
from tiny_models import tiny_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

import kleash
from kleash.cli.parsing import read_words
from kleash.diagnosis import read_rollouts
from kleash.errors import ModelError, OptionError, RankError, RunFolderError, SourceError, UnknownNameError
from kleash.jobs import MeasureJob, SweepJob
from kleash.jobs.reading_jobs import DoctorJob
from kleash.measuring.keywords import pair_in_memory
from kleash.measuring.model_pair import header_of
from kleash.reports.text_formats import model_card

TEXTS = ["The sea was calm and the boat went out.", "A long road leads out of the town."]
MESSAGES = [{"role": "user", "content": "Count the birds"}]


@pytest.fixture(scope="module")
def tokenizer(pair):
    return AutoTokenizer.from_pretrained(pair[0])


@pytest.fixture
def policy(pair):
    """The policy with weights that no file has, in training mode."""
    network = AutoModelForCausalLM.from_pretrained(pair[0])
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return network.train()


def mean_kl(policy, reference, tokenizer, texts, *, backward=False):
    """The mean over all positions but the first of KL(policy ‖ reference), from logits in float64."""
    sums = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            p, q = (net(ids).logits[0, :-1].double().log_softmax(-1) for net in (policy, reference))
        p, q = (q, p) if backward else (p, q)
        sums.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(sums).mean().item()


def test_a_model_in_memory_is_measured_as_it_is_and_left_as_it_was(policy, pair, tokenizer, tmp_path):
    state, state_of_torch = random.getstate(), torch.random.get_rng_state()
    models = {"policy": policy, "reference": pair[1], "tokenizer": tokenizer}
    measured = kleash.measure(**models, text=TEXTS, out=tmp_path / "run")
    assert policy.training and random.getstate() == state
    assert torch.equal(torch.random.get_rng_state(), state_of_torch)
    reference = AutoModelForCausalLM.from_pretrained(pair[1])
    for name, backward in (("kl_policy_reference", False), ("kl_reference_policy", True)):
        expected = mean_kl(policy.eval(), reference.eval(), tokenizer, TEXTS, backward=backward)
        assert measured.per_token[name].value == pytest.approx(expected, rel=1e-5), name
    assert measured.models["policy"].path == f"{pair[0]} in memory"
    assert measured.estimand.endswith("policy in memory; reference stored as F32")
    assert measured.dtype_gap is None and measured.noise_floor is not None


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft reads it
def test_the_reference_of_an_adapter_in_memory_is_its_base(pair, tokenizer, tmp_path):
    adapter = tiny_adapter(tmp_path / "adapter", pair[1])
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pair[1]), adapter).eval()
    tokenizer.save_pretrained(alone := tmp_path / "tokenizer")
    measured = kleash.measure(policy=adapted, tokenizer=alone, text=TEXTS, out=tmp_path / "run")
    base = AutoModelForCausalLM.from_pretrained(pair[1]).eval()
    expected = mean_kl(adapted, base, tokenizer, TEXTS)
    assert measured.per_token["kl_policy_reference"].value == pytest.approx(expected, rel=1e-5)
    paths = [model.path.split("in memory")[1] for model in measured.models.values()]
    assert paths == [", adapter default", ", without its adapters"]
    with adapted.disable_adapter():
        disabled = kleash.measure(policy=adapted, tokenizer=alone, text=TEXTS, out=tmp_path / "disabled")
    assert disabled.models["policy"].path.endswith(paths[1]) and "one network" in disabled.warnings[0]
    base = adapted.get_base_model()  # into which PEFT has put the adapter
    one_network = adapted, base, adapted.base_model, torch.compile(base, backend="eager")
    for policy, reference in permutations(one_network, 2):
        with pytest.raises(OptionError, match="one network in memory"):
            kleash.measure(
                policy=policy, reference=reference, tokenizer=alone, text=TEXTS, out=tmp_path / "one"
            )
    adapted.add_adapter("other", adapted.peft_config["default"])
    adapted.base_model.set_adapter(["default", "other"])
    with pytest.raises(ModelError, match=r"of the policy must act in all layers, .* default with other"):
        kleash.measure(policy=adapted, tokenizer=alone, text=TEXTS, out=tmp_path / "two")


def test_a_policy_by_name_is_loaded_beside_a_reference_in_memory_of_two_bytes(pair, tokenizer, tmp_path):
    reference = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.bfloat16)
    models = {"policy": pair[0], "reference": reference, "tokenizer": tokenizer}
    measured = kleash.measure(**models, prompts=TEXTS, max_new_tokens=4, out=tmp_path / "run")
    assert {model.dtype for model in measured.models.values()} == {"bfloat16"}
    assert measured.models["policy"].fingerprint.startswith("sha256:")
    assert measured.dtype_gap is None  # there are no files to load it from in float32
    repeated = read_words(model_card(measured).partition("```bash\nkleash ")[2].partition("\n```")[0].split())
    assert (repeated.policy, repeated.reference) == (str(pair[0]), "REFERENCE")


def test_models_in_memory_are_one_pair_whatever_their_names(policy, tokenizer, tmp_path):
    processor = SimpleNamespace(tokenizer=tokenizer)
    models = {"policy": policy, "reference": policy, "tokenizer": processor}
    measured = kleash.measure(**models, text=TEXTS, out=tmp_path / "same")
    assert measured.per_token["kl_policy_reference"].value == 0 and "one network" in measured.warnings[0]
    with pytest.raises(RunFolderError, match=r"holds a run already; .* --resume \(resume=True\)"):
        kleash.measure(**models, text=TEXTS, out=tmp_path / "same")
    with pytest.raises(OptionError, match=r"be text; it is a .*; save it with save_pretrained and give"):
        kleash.sweep(candidates=[policy], text=TEXTS)


def test_a_folder_that_is_left_is_not_joined_by_other_weights_in_memory(policy, tokenizer, tmp_path):
    job = kleash.MeasureJob(policy="p", text="t")
    headers = []
    for _ in range(2):
        with pair_in_memory({"policy": policy, "reference": policy, "tokenizer": tokenizer}) as (_, pair):
            headers.append(header_of(job, pair, "digest"))
    assert any("fingerprint" in clause for clause in headers[0].differences(headers[1]))


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"tokenizer": None}, OptionError, "tokenizer="),
        ({"tokenizer": 3}, OptionError, "type int"),
        ({"reference": None}, OptionError, "give reference="),
        ({"resume": True}, OptionError, "resume"),
        ({"dtype": "bfloat16"}, OptionError, "dtype"),
        ({"reference_cache": "cache"}, OptionError, "reference_cache"),
        ({"engine": "ray"}, OptionError, "engine"),
        ({"policy": 3}, ModelError, "transformers model"),
        ({"policy": "no head"}, ModelError, "is of type LlamaModel; give a transformers model with"),
        ({"policy": "wrapped"}, ModelError, "of type DataParallel; give .*, which is the .module of this"),
        ({"reference": "http://127.0.0.1:1/v1"}, ModelError, "server"),
    ],
)
def test_what_cannot_be_with_a_model_in_memory_is_refused(
    options, error, word, policy, pair, tokenizer, tmp_path
):
    given = {"policy": policy, "reference": str(pair[1]), "tokenizer": tokenizer, "text": TEXTS, **options}
    networks = {"no head": policy.model, "wrapped": torch.nn.DataParallel(policy)}
    given["policy"] = networks.get(given["policy"], given["policy"])
    with pytest.raises(error, match=word):
        kleash.measure(**given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_in_memory_has_one_process(policy, tokenizer, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RankError, match="in memory"):
        kleash.measure(policy=policy, reference=policy, tokenizer=tokenizer, text=TEXTS)


def numbers(measurement):
    return {name: number.value for name, number in measurement.statistics().items()}


def test_prompts_in_memory_give_the_numbers_of_a_file(pair, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    both = {"policy": pair[0], "reference": pair[1]}
    of_file, of_list = (
        kleash.measure(**both, prompts=prompts, max_new_tokens=4, out=tmp_path / f"run-{place}")
        for place, prompts in enumerate([path, TEXTS])
    )
    assert numbers(of_list) == pytest.approx(numbers(of_file), nan_ok=True)


def test_messages_and_responses_in_memory(pair, tmp_path):
    both = {"policy": pair[0], "reference": pair[1]}
    asked = kleash.measure(**both, prompts=[MESSAGES, TEXTS[0]], max_new_tokens=4, out=tmp_path / "a")
    prompts = pq.read_table(tmp_path / "a" / "sequences")["prompt"].to_pylist()
    assert prompts[0].endswith("user: Count the birds\nassistant: ")
    assert asked.counts.prompts == 2
    answered = [{"prompt": "Two", "response": " men"}, {"prompt_token_ids": [5], "response_token_ids": [7]}]
    with pytest.raises(SourceError, match=r"^responses, entry 1: expected a field 'response'"):
        kleash.measure(**both, responses=[{"prompt": "Two"}], out=tmp_path / "b")  # leaves it to others
    given = kleash.measure(**both, responses=answered, out=tmp_path / "b")
    assert given.counts.sequences == 2
    lines = (tmp_path / "b" / "source.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == answered


def test_a_run_of_a_list_is_resumed_and_its_list_is_not_written_over(pair, tmp_path):
    out = tmp_path / "run"
    options = {"policy": pair[0], "reference": pair[1], "text": TEXTS, "out": out}
    first = kleash.measure(**options)
    (out / "measurement.json").unlink()
    with pytest.raises(RunFolderError, match="another source"):
        kleash.measure(**{**options, "text": TEXTS[:1]}, resume=True)
    assert numbers(kleash.measure(**options, resume=True)) == pytest.approx(numbers(first), nan_ok=True)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"polcy": "a"}, UnknownNameError, "did you mean 'policy'"),
        ({"prompts": TEXTS, "text": TEXTS}, OptionError, "--prompts and --text"),
        ({"prompts": []}, SourceError, "no entry"),
        ({"prompts": [1]}, SourceError, "entry 1"),
        ({"prompts": {"train": TEXTS}}, SourceError, "train"),
        ({"prompts": 3}, SourceError, "3"),
        ({"prompts": TEXTS, "limit": 0}, OptionError, "--limit"),
    ],
)
def test_wrong_keywords_are_refused_before_anything_is_written(options, error, word, tmp_path):
    with pytest.raises(error, match=word):
        kleash.measure(out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


NO_FIELDS = ("job", "reporter", "rollouts", "pair", "file")
FUNCTIONS = ((kleash.measure, MeasureJob), (kleash.sweep, SweepJob), (kleash.diagnose, DoctorJob))


@pytest.mark.parametrize(("function", "job"), FUNCTIONS)
def test_editors_see_the_fields_of_the_job(function, job):
    options = [each for each in inspect.signature(function).parameters.values() if each.name not in NO_FIELDS]
    defaults = {field.name: field.default for field in fields(job) if field.name not in NO_FIELDS}
    assert {each.name: each.default for each in options} == defaults
    assert all(is_subhint(get_type_hints(job)[each.name], each.annotation) for each in options)
    assert " at 0x" not in str(inspect.signature(job))  # as help shows it


def test_a_job_is_given_alone():
    for arguments, options in ((("drift/",), {}), ((kleash.MeasureJob(),), {"out": "a"})):
        with pytest.raises(OptionError, match="MeasureJob"):
            kleash.measure(*arguments, **options)


def test_a_sweep_of_a_list(pair, tmp_path):
    options = {"candidates": [str(path) for path in pair], "reference": pair[1], "text": TEXTS}
    swept = kleash.sweep(**options, out=tmp_path / "sweep")
    assert [candidate.name for candidate in swept.ranking] == [str(pair[1]), str(pair[0])]
    assert (tmp_path / "sweep" / "source.jsonl").exists()
    again = kleash.sweep(**options, out=tmp_path / "sweep", resume=True)
    assert again.to_dict()["candidates"] == swept.to_dict()["candidates"]


def test_a_diagnosis_takes_files_and_rollouts(tmp_path):
    row = {"prompt_token_ids": [1], "response_token_ids": [5, 6, 7], "trainer_logprobs": [-1.0, -2.0, -0.5]}
    path = tmp_path / "rollouts.jsonl"
    path.write_text(30 * (json.dumps({**row, "engine_logprobs": [-1.0, -2.0, -0.5]}) + "\n"))
    of_file = kleash.diagnose(path, limit=20, rounding="float32")
    assert of_file.sequences == 20 and of_file.findings == ()
    assert kleash.diagnose([str(path)]).sequences == 30
    assert kleash.diagnose(read_rollouts(path), rounding="float32").tokens == 90
    with pytest.raises(UnknownNameError, match="rounding"):
        kleash.diagnose(path, runding="float32")
