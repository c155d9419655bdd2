"""``--config``: options from a file, from the ``run.json`` of a run, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from kleash.cli.parsing import read_words
from kleash.errors import OptionError
from kleash.jobs import GRPOJob, MeasureJob, SweepJob
from kleash.store.codec import to_json
from kleash.store.job_folder import RunHeader

JOB = {"limit": 4, "max-new-tokens": 8, "temperature": 0.5, "quiet": True, "report_to": ["tensorboard"]}


def config(folder: Path, text: str, name: str = "job.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def yaml_of(options: dict[str, Any]) -> str:
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items())


@pytest.mark.parametrize("write", [json.dumps, yaml_of])
def test_options_come_from_the_file_and_those_of_the_line_win(tmp_path: Path, write: Any) -> None:
    path = config(tmp_path, write(JOB))
    expected: Any = {name.replace("-", "_"): value for name, value in JOB.items()}
    expected["report_to"] = ("tensorboard",)
    assert read_words(["measure", "--config", path]) == MeasureJob(**expected)
    told = read_words(["measure", "--limit", "9", "--config", path, "--report-to", "wandb"])
    assert told == MeasureJob(**{**expected, "limit": 9, "report_to": ("wandb",)})


def test_words_without_an_option_and_numbers_that_yaml_takes_for_text_are_in_the_file_too(
    tmp_path: Path,
) -> None:
    for command, name, words in (
        ("compare", "folders", ["a", "b"]),
        ("report", "folder", ["a"]),
        ("audit", "target", ["kleash:kl"]),
        ("mismatch", "rollouts", ["a"]),
    ):
        path = config(tmp_path, yaml_of({name: words if name.endswith("s") else words[0]}))
        for given in ([], [f"other-{word}" for word in words]):
            assert read_words([command, *given, "--config", path]) == read_words([command, *(given or words)])
    path = config(tmp_path, "learning_rate: 1e-4\nsteps: 3\n")
    assert read_words(["train", "grpo", "--config", path]) == GRPOJob(learning_rate=1e-4, steps=3)


@pytest.mark.parametrize(
    ("command", "job"),
    [
        ("measure", MeasureJob(text="x.txt", window=64, at_most=0.1, direction="policy-reference")),
        ("train grpo", GRPOJob(beta=0.3, kl="k3", kl_scope="token", steps=7, seed=5)),
        ("sweep", SweepJob(candidates=("a", "b"), at_most=0.1, direction="policy-reference")),
    ],
)
def test_a_runs_own_header_repeats_it(tmp_path: Path, command: str, job: Any) -> None:
    written: Any = {"job": job.settings()}  # as sweep.json
    if command != "sweep":
        written = RunHeader(kleash="0", settings=job.settings(), source_sha256="", fingerprints={})
    path = config(tmp_path, to_json(written), "run.json")
    assert read_words([*command.split(), "--config", path]) == job
    for other in {"measure", "sweep", "train rloo", "train grpo"} - {command}:
        with pytest.raises(OptionError, match=f"it is of kleash {command}, and this is kleash {other}"):
            read_words([*other.split(), "--config", path])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("limt: 4", "no option of kleash measure is called 'limt'; did you mean 'limit'?"),
        ("limit: many", "--limit takes a whole number; it is 'many'"),
        ("limit: [1]", "--limit must be a whole number"),
        ("- limit", "it has no options; write each on a line of its own, as limit: 64"),
        ("# limit: 4", "it has no options; write each"),
        ("limit: 4\nquiet: true\nlimit: 4000", "gives limit twice"),
        ("max-new-tokens: 4\nmax_new_tokens: 8", "gives max_new_tokens twice"),
        ('{"settings": {"limit": 4, "limit": 8}}', "gives limit twice"),
        ("{limit: 1}", "neither JSON nor YAML"),
        ("limit: [", "neither JSON nor YAML"),
        ("limit: !!python/object/apply:os.getcwd []", "neither JSON nor YAML"),
    ],
)
def test_what_is_no_option_is_refused_with_the_file(tmp_path: Path, text: str, reason: str) -> None:
    path = config(tmp_path, text)
    with pytest.raises(OptionError) as refused:
        read_words(["measure", "--config", path])
    assert reason in str(refused.value) and path in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    for path, reason in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "bytes.yaml", "neither JSON nor YAML"),
    ):
        with pytest.raises(OptionError, match=reason):
            read_words(["measure", "--config", str(path)])
    with pytest.raises(OptionError, match=r"no option of kleash env is called 'limit'$"):
        read_words(["env", "--config", config(tmp_path, "limit: 4")])
