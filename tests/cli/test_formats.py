"""``--format``: what is printed in place of a summary, by every command that has it."""

import csv
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from synthetic_run import synthetic_sweep, write_sweep_folder, write_synthetic_run

from kleash.cli import main
from kleash.cli.parsing import RECORDS
from kleash.errors import OptionError
from kleash.jobs import MeasureJob, SweepJob
from kleash.jobs.output_options import FORMATS, MEASUREMENT_FORMATS, FormatOption, MeasurementFormatOption
from kleash.measuring.llama_cpp_summary import STORED_COLUMNS, llama_cpp_text
from kleash.records import Measurement, RunFolder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two small run folders."""
    root = tmp_path_factory.mktemp("formats")
    for seed, name in enumerate(("a", "b")):
        write_synthetic_run(root / name, prompts=6, tokens=96, seed=seed, shards=2)
    return [root / "a", root / "b"]


def printed(capsys, *words, code=0):
    capsys.readouterr()
    assert main([str(word) for word in words]) == code, capsys.readouterr().err
    return capsys.readouterr().out


def read_csv(text):
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def test_report_prints_every_format_and_writes_the_page(runs, capsys):
    measurement = Measurement.read(runs[0])
    (runs[0] / "report.html").unlink(missing_ok=True)
    as_json = printed(capsys, "report", runs[0], "--json")
    assert json.loads(as_json) == measurement.to_dict()
    assert (runs[0] / "report.html").exists()
    rows = read_csv(printed(capsys, "report", runs[0], "--format", "csv"))
    assert float(rows[0]["value"]) == measurement.per_token["kl_policy_reference"].value
    assert printed(capsys, "report", runs[0], "--format", "markdown").startswith("**KL(policy ‖ reference)")
    card = printed(capsys, "report", runs[0], "--format", "model-card")
    assert card.startswith("---\nmodel-index:\n- name: policy\n")


def test_llama_cpps_statistics_are_those_of_the_tokens(runs, capsys):
    text = printed(capsys, "report", runs[0], "--format", "llama.cpp")
    tokens = pq.read_table(runs[0] / "tokens").to_pydict()
    kld = np.array(tokens["kl_reference_policy"])
    same = np.equal(tokens["top1_policy"], tokens["top1_reference"])
    loss, base = (-np.array(tokens[f"logp_{who}"]) for who in ("policy", "reference"))
    q, p, ratio = (np.exp(each.mean()) for each in (loss, base, loss - base))
    change, rms = np.exp(-loss) - np.exp(-base), np.sqrt(np.mean((np.exp(-loss) - np.exp(-base)) ** 2))
    expected = {  # value, and of a mean of independent tokens, or what is linearised to one, the terms
        "Mean    KLD": (kld.mean(), kld),
        "Maximum KLD": (kld.max(), None),
        "Median  KLD": (np.median(kld), None),
        "5.0%   KLD": (np.quantile(kld, 0.05), None),
        "Minimum KLD": (kld.min(), None),
        "Mean PPL(Q)": (q, q * loss),
        "Mean PPL(base)": (p, p * base),
        "Mean ln(PPL(Q)/PPL(base))": (np.mean(loss - base), loss - base),
        "Mean PPL(Q)/PPL(base)": (ratio, ratio * (loss - base)),
        "Mean PPL(Q)-PPL(base)": (q - p, q * loss - p * base),
        "Cor(ln(PPL(Q)), ln(PPL(base)))": (np.corrcoef(loss, base)[0, 1], None),
        "Mean    Δp": (change.mean(), change),
        "75.0%   Δp": (np.quantile(change, 0.75), None),
        "RMS Δp": (rms, change**2 / (2 * rms)),
        "Same top p": (same.mean(), same),
    }
    lines = {name.strip(): rest for name, _, rest in (line.rpartition(":") for line in text.splitlines())}
    for name, (value, terms) in expected.items():
        error = [] if terms is None else [np.std(terms, ddof=1) / len(kld) ** 0.5]
        scale = 100 if lines[name].endswith("%") else 1
        near = 2e-2 if name.startswith("Cor") else 2e-3 if scale == 100 else 2e-6
        numbers = [float(number) for number in lines[name].removesuffix("%").split(" ± ")]
        assert numbers == pytest.approx(scale * np.array([value, *error]), abs=near), name
        digits, *widths = (6, 10, 10) if scale == 1 else (2 if name.startswith("Cor") else 3, 6, 5)
        shown = [f"{number:{width}.{digits}f}" for number, width in zip(numbers, widths, strict=False)]
        end = "" if scale == 1 else "%" if terms is None else " %"
        assert lines[name] == f" {' ± '.join(shown)}{end}", name
    assert {line.rfind(":") for line in text.splitlines() if "PPL" in line} == {30}


def test_llama_cpps_statistics_of_unlikely_unknown_and_lost_tokens(runs, tmp_path, capsys, monkeypatch):
    cut = shutil.copytree(runs[1], tmp_path / "cut")
    (cut / "tokens" / "part-00001.parquet").unlink()
    assert printed(capsys, "report", cut, "--format", "llama.cpp", code=2) == "", "and no numbers of a part"
    measurement = Measurement.read(runs[0])
    names = (*STORED_COLUMNS, "kl_reference_policy")
    part = {name: np.full(100, 1.0, dtype=np.float32) for name in names}
    part |= {name: -part[name] for name in ("logp_policy", "logp_reference")}
    part["logp_policy"][0] = -np.inf
    monkeypatch.setattr(RunFolder, "parts", lambda self, kind, names: iter([part]))
    monkeypatch.setattr(RunFolder, "token_columns", lambda self: frozenset(part))
    assert "Mean PPL(Q)                   :        inf" in llama_cpp_text(measurement)
    part["kl_reference_policy"][5] = np.nan
    with pytest.raises(OptionError, match=f"of every token, which {runs[0]} does not have"):
        llama_cpp_text(measurement)


@pytest.mark.parametrize("output_format", ["csv", "model-card", "llama.cpp", "markdown"])
def test_a_gate_decides_the_exit_code_in_every_format(output_format, runs, capsys):
    said = {"1e-9": "failed: KL(policy ‖ reference) per token is above", "1": "about 3,444 more tokens"}
    for limit, code in (("1e-9", 1), ("1", 3)):
        assert main(["report", str(runs[0]), "--at-most", limit, "--format", output_format]) == code
        output = capsys.readouterr()
        where = output.out if output_format == "markdown" else output.err
        assert said[limit] in where.replace("\\", "")


def test_compare_and_mismatch_and_doctor_print_csv_and_markdown(runs, tmp_path, capsys):
    words = ["compare", *runs, "--out", tmp_path / "c.html"]
    rows = read_csv(printed(capsys, *words, "--format", "csv"))
    data = json.loads(printed(capsys, *words, "--json"))
    (difference,) = [row for row in rows if row["minus"] == "a" and row["name"] == "kl_policy_reference"]
    assert float(difference["value"]) == data["differences"][0]["differences"]["kl_policy_reference"]["value"]
    floors = {row["run"]: float(row["value"]) for row in rows if row["name"] == "noise_floor"}
    assert floors == {run["name"]: run["noise_floor"]["value"] for run in data["runs"]}
    assert "| `b` |" in printed(capsys, *words, "--format", "markdown")
    rollout = {"prompt_token_ids": [1], "response_token_ids": [2, 3]}
    rollout |= {"trainer_logprobs": [-1.0, -2.0], "engine_logprobs": [-1.5, -2.0]}
    (file := tmp_path / "rollouts.jsonl").write_text("\n".join(json.dumps(rollout) for _ in range(3)))
    json.loads(printed(capsys, "mismatch", file, "--json"))
    assert "rollouts.jsonl" in printed(capsys, "mismatch", file, "--format", "markdown")
    assert printed(capsys, "doctor", file, "--format", "csv").startswith("run,minus,name,value")


def test_the_folder_of_a_sweep_has_its_page_again_and_formats(tmp_path, capsys):
    sweep = write_sweep_folder(tmp_path, synthetic_sweep())
    assert printed(capsys, "report", tmp_path) == f"{tmp_path / 'sweep.html'}\n"
    assert "q6" in (tmp_path / "sweep.html").read_text()
    assert printed(capsys, "report", tmp_path, "--json") == sweep.to_json()
    assert len(read_csv(printed(capsys, "report", tmp_path, "--format", "csv"))) > 20
    for option, value in (("--format", "model-card"), ("--format", "llama.cpp")):
        assert main(["report", str(tmp_path), option, value]) == 2
        assert f"{option} {value} is for one measurement; of a sweep" in capsys.readouterr().err
    (tmp_path / "sweep.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 2
    assert "sweep.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--format csv", "--at-most 1", "--picture a.png"])
def test_a_training_folder_has_no_format_gate_or_picture(option, tmp_path, capsys):
    (tmp_path / "steps.jsonl").write_text("")
    assert main(["report", str(tmp_path), *option.split()]) == 2
    refused = "training run, and --at-most, --format, --json, --picture and --report-to are"
    assert refused in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("report x --format xml", "one of csv, markdown, model-card, llama.cpp, or else --json; it is 'xml'"),
        ("compare a b --format model-card", "one of csv, markdown, or else --json; it is 'model-card'"),
        ("report x --json --format csv", "--json prints JSON; give it or --format csv, not both"),
        ("measure --json --format markdown", "not both"),
        ("cache --format csv --out x", "--format must be one of llama.cpp"),
        ("report x --output-format csv", "did you mean --format?"),
    ],
)
def test_what_contradicts_itself_is_refused(words, message, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_format_changes_no_setting_of_a_run():
    assert MeasureJob(format="csv").settings() == MeasureJob().settings()
    job = SweepJob(candidates=("shipped:policy",), format="csv", out="o")
    assert job.measure_job(1, Path("o")).output_format is None
    with pytest.raises(OptionError, match="--format must be text"):
        MeasureJob(format=3)


def test_the_commands_with_formats_and_their_help_agree(capsys):
    have = {name for name, record in RECORDS.items() if issubclass(record, FormatOption)}
    assert have == {"measure", "sweep", "report", "compare", "mismatch", "doctor"}
    for name in have:
        formats = MEASUREMENT_FORMATS if issubclass(RECORDS[name], MeasurementFormatOption) else FORMATS
        text = " ".join(printed(capsys, name, "--help-all").partition("--format FORMAT")[2].split())
        named = {word for word in MEASUREMENT_FORMATS if re.search(rf"{re.escape(word)}[,;]| {word}", text)}
        assert named == set(formats) >= set(FORMATS), name
