"""``kleash sweep``: candidates against one reference, their ranking, and what happens to those that fail."""

import json
import platform
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from command_words import words
from safetensors.torch import load_file
from tiny_models import save_tiny, tiny_tokenizer

from kleash.cli import main
from kleash.cli.parsing import read_words
from kleash.cli.printing import print_summary
from kleash.errors import Interrupted, ModelError, OptionError, RunFolderError
from kleash.jobs import SweepJob
from kleash.jobs.sweep import slug
from kleash.measuring import compare, measure, sweep, sweep_run
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.reference_cache import is_cached
from kleash.measuring.sweep_ranking import pareto_front
from kleash.reports.folder_report import write_report_of
from kleash.store import Number, RunFolder
from kleash.store.number_rows import number_rows
from kleash.store.sweep import Sweep, SweepCandidate

WINDOWS = {"window": 128, "batch_tokens": 1024}
DOCUMENTS = [
    " ".join(f"Boat {n} went out {n * k + k} times before the sun had come up;" for k in range(2))
    for n in range(34)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a reference, four candidates and a text."""
    root = tmp_path_factory.mktemp("sweep")
    save_tiny(root / "base")
    save_tiny(root / "near", apart=0.02)
    save_tiny(root / "far", apart=0.3)
    save_tiny(root / "copy-of-near", apart=0.02)
    save_tiny(root / "another-tokenizer", apart=0.02)
    tiny_tokenizer(280).save_pretrained(root / "another-tokenizer")
    (root / "text.txt").write_text("\n\n".join(DOCUMENTS))
    return root


@pytest.fixture(scope="module")
def job(folder):
    """The sweep over the candidates; one of them has another tokenizer."""
    names = ("far", "near", "another-tokenizer", "copy-of-near")
    return SweepJob(
        candidates=tuple(str(folder / name) for name in names),
        reference=str(folder / "base"),
        text=str(folder / "text.txt"),
        out=str(folder / "out"),
        **WINDOWS,
    )


@pytest.fixture(scope="module")
def result(job):
    return sweep(job)


def test_a_candidate_has_the_numbers_of_its_own_measurement(job, result, folder):
    options = {"policy": job.candidates[0], "reference": job.reference, "text": job.text, **WINDOWS}
    alone = measure(out=folder / "alone", **options)
    candidate = result.candidates[0]
    for name in ("kl_policy_reference", "kl_reference_policy", "top1_agreement"):
        assert candidate.numbers[name].value == pytest.approx(alone.statistics()[name].value, rel=1e-6)
    quantile = alone.quantiles["kl_policy_reference"]["99.9"]
    assert candidate.numbers["kl_policy_reference_99.9"].value == pytest.approx(quantile.value, rel=1e-5)
    assert result.tokens == alone.counts.tokens
    tensors = load_file(folder / "far" / "model.safetensors").values()
    assert candidate.bytes_on_disk == sum(4 * tensor.numel() for tensor in tensors)
    assert candidate.bits_per_weight == 32
    floors = [row.value for row in number_rows(result) if row.name == "noise_floor"]
    assert floors == [each.noise_floor.value for each in result.ranking]


def test_candidates_are_ranked_with_ties(result):
    assert [Path(candidate.name).name for candidate in result.ranking] == ["near", "copy-of-near", "far"]
    assert [candidate.letters for candidate in result.candidates] == ["b", "a", "", "a"]
    tie = next(pair for pair in result.pairs if pair.is_tie)
    assert (tie.first, tie.second, tie.simultaneous_ci95) == (2, 4, (0.0, 0.0))
    at_half = replace(result, job={**result.job, "temperature": 0.5})
    assert "text.txt, all models at temperature 0.5" in at_half.summary()


def test_a_pair_has_the_paired_difference_of_compare(job, result):
    out = Path(str(job.out))
    comparison = compare([out / result.candidates[1].folder, out / result.candidates[0].folder])
    pair = result.pairs[0]
    assert (pair.first, pair.second) == (1, 2)
    expected = comparison.differences[0].differences["kl_reference_policy"]
    assert pair.difference.value == pytest.approx(expected.value, rel=1e-12)
    assert pair.difference.standard_error == pytest.approx(expected.standard_error, rel=1e-9)


def test_a_candidate_with_another_tokenizer_is_named_and_the_page_has_the_others_and_the_command(job, result):
    (failed,) = result.failed
    assert failed.number == 3 and "token" in failed.failure
    assert Sweep.read(Path(str(job.out))).to_json() == result.to_json()
    page = (Path(str(job.out)) / "sweep.html").read_text()
    assert "Not measured" in page and 'href="candidates/01-far/report.html"' in page
    assert page.count('data-heading="KL(reference ‖ policy), nats"') == len(result.ranking), "on phones, too"
    command = page.partition('<pre class="command" tabindex="0"><code>')[2].partition("</code>")[0]
    assert replace(read_words(command.split()[1:]), out=job.out) == job
    assert f'<th scope="row">python</th><td>{platform.python_version()}</td>' in page


def test_without_a_candidate_the_reference_is_not_run(job, folder, tmp_path):
    missing = (str(folder / "q4.gguf"), str(folder / "q5" / "model"))
    with pytest.raises(ModelError, match=r"no candidate can be found: .*q4\.gguf"):
        sweep(**{**vars(job), "candidates": missing, "out": tmp_path / "none"})
    assert not (tmp_path / "none" / "reference-cache").exists()


def test_a_missing_candidate_is_named_before_the_reference_is_run(job, folder, tmp_path, monkeypatch):
    notes = []
    reporter = ProgressReporter()
    monkeypatch.setattr(reporter, "note", notes.append)
    monkeypatch.setattr(sweep_run, "_cache_reference", Mock(side_effect=OptionError("would be run now")))
    candidates = (str(folder / "base"), str(folder / "typo.gguf"))
    with pytest.raises(OptionError, match="would be run now"):
        sweep(replace(job, candidates=candidates, out=str(tmp_path / "one")), reporter)
    assert [note for note in notes if "typo.gguf" in note]


def test_a_resumed_sweep_keeps_what_is_finished_and_takes_more_candidates(job, result, folder, monkeypatch):
    measured = Path(str(job.out)) / result.candidates[0].folder / "measurement.json"
    written = measured.stat().st_mtime_ns
    save_tiny(folder / "third", apart=0.1)

    def load_again(*_):
        raise AssertionError("the reference was loaded although its cache is finished")

    monkeypatch.setattr("kleash.measuring.reference_cache.load_reference", load_again)
    again = sweep(**{**vars(job), "resume": True, "candidates": (*job.candidates, str(folder / "third"))})
    assert measured.stat().st_mtime_ns == written
    assert again.candidates[0].numbers == result.candidates[0].numbers
    names = [Path(candidate.name).name for candidate in again.ranking]
    assert names == ["near", "copy-of-near", "third", "far"]
    other_weights = SweepJob(**{**vars(job), "resume": True, "candidates": (str(folder / "third"),)})
    assert other_weights.folder_of(1) != job.folder_of(1)


@pytest.mark.parametrize(
    ("option", "difference"),
    [
        ("temperature", "--temperature was 1.0 and is now 0.5"),
        ("text", "--text was"),
        ("candidates", "--policy was"),
    ],
)
def test_other_options_leave_the_sweep_as_it_is(job, result, tmp_path, option, difference):
    """The cache of the reference fits these options, and no candidate's run does."""
    others = {
        "temperature": 0.5,
        "text": str(shutil.copy(str(job.text), tmp_path / "copy.txt")),
        "candidates": ("elsewhere/far", *job.candidates[1:]),
    }
    written = (Path(str(job.out)) / "sweep.json").read_bytes()
    with pytest.raises(RunFolderError, match=f"01-far holds another run: {difference}.*as it was, or give"):
        sweep(**{**vars(job), option: others[option], "resume": True})
    assert (Path(str(job.out)) / "sweep.json").read_bytes() == written


def test_a_long_name_does_not_narrow_the_numbers_in_the_terminal(result, capsys):
    long = [replace(each, name="/" + 300 * "x" + Path(each.name).name) for each in result.candidates]
    print_summary(replace(result, candidates=tuple(long)), Path("sweep.html"))
    printed = capsys.readouterr().out
    assert len(re.findall(r"nats +\d\.\d+ to \d\.\d+ ", printed)) == 3
    lines = printed[: printed.index("Not measured")].splitlines()
    assert max(len(line) for line in lines if "rows of a head" not in line) < 180


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, True), ({"window": 64}, False), ({"temperature": 0.5}, False), ({"dtype": "float64"}, False)],
)
def test_a_cache_of_other_options_is_not_the_cache_of_a_sweep(job, result, options, expected):
    cache_job = SweepJob(**{**vars(job), **options}).cache_job(Path(str(job.out)))
    assert is_cached(cache_job) == expected


def test_a_finished_candidate_whose_files_changed_is_not_kept(folder, result, job):
    save_tiny(folder / "moving", apart=0.05)
    options = {**vars(job), "candidates": (str(folder / "moving"),), "out": str(folder / "moved")}
    sweep(**options)
    save_tiny(folder / "moving", apart=0.1)
    (failed,) = sweep(**{**options, "resume": True}).candidates
    assert "fingerprint" in failed.failure


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_holds_something_else_is_refused(job, result, tmp_path, resume):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=r"holds notes\.txt and is no sweep"):
        sweep(**{**vars(job), "out": str(tmp_path), "resume": resume})
    with pytest.raises(RunFolderError, match="--resume"):
        sweep(job)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_copies_of_the_reference_differ_by_exactly_0(job, folder):
    candidates = (str(folder / "base"), str(shutil.copytree(folder / "base", folder / "copy-of-base")))
    result = sweep(**{**vars(job), "candidates": candidates, "out": folder / "copies"})
    (pair,) = result.pairs
    assert pair.is_tie and pair.simultaneous_ci95 == (0, 0) and not pair.difference.warnings


def test_a_candidate_whose_run_is_damaged_fails_and_the_others_are_ranked(job, result, folder):
    part = next((Path(str(job.out)) / result.candidates[1].folder / "tokens").glob("part-*.parquet"))
    content = part.read_bytes()
    try:
        part.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        again = sweep(**{**vars(job), "resume": True})
        assert "is damaged" in again.candidates[1].failure
        assert [candidate.number for candidate in again.ranking] == [4, 1]
    finally:
        part.write_bytes(content)


def test_ctrl_c_names_the_command_that_resumes(job, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_run, "cache_reference", Mock(side_effect=KeyboardInterrupt))
    for resume in (False, True):  # nothing is there to resume: a batch job is begun as it is requeued
        with pytest.raises(Interrupted, match=f"--resume --out {tmp_path / 'new'}"):
            sweep(**{**vars(job), "out": str(tmp_path / "new"), "resume": resume})


def test_the_command_exits_with_2_if_a_candidate_failed(job, result, capsys):
    line = words("sweep", reference=job.reference, text=job.text, out=job.out, resume=True, **WINDOWS)
    assert main([*line, "--json", "--candidates", *job.candidates]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["candidates"][2]["failure"]
    assert "could not be measured" in printed.err


def test_two_commands_on_one_folder_rank_as_one_does(job, result, command_forks, tmp_path):
    line = words("sweep", reference=job.reference, text=job.text, out=tmp_path / "out", json=True, **WINDOWS)
    commands = [command_forks.start([*line, "--candidates", *job.candidates]) for _ in range(2)]
    ended = [(process.communicate(), process.returncode) for process in commands]
    assert sorted(code for _, code in ended) == [0, 2], ended
    assert all(bool(output) is (code == 2) for (output, _), code in ended)
    shared = Sweep.read(tmp_path / "out")
    assert [x.numbers for x in shared.candidates] == [x.numbers for x in result.candidates]
    assert shared.pairs == result.pairs


def test_a_measurement_that_another_process_has_just_made_is_kept(job, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "out" / job.folder_of(1))
    versions = []

    def is_too_early(measure_job, _):  # the other process is ready after this look
        measure(replace(measure_job, resume=True))
        versions.append(folder.measurement_version())

    monkeypatch.setattr(sweep_run, "_finished_run", is_too_early)
    sweep(replace(job, candidates=job.candidates[:1], out=str(tmp_path / "out")))
    assert versions == [folder.measurement_version()] != [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name the models"),
        ({"candidates": ("a", "a"), "text": "t"}, "twice"),
        ({"candidates": ("http://host/v1",), "text": "t"}, "is a server"),
        ({"candidates": ("a",), "reference": "b"}, "--text or --responses"),
        ({"candidates": ("a",), "reference": "b", "text": "t", "responses": "r"}, "--text and --responses"),
    ],
)
def test_jobs_that_cannot_be_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        SweepJob(**options)  # type: ignore[arg-type]


def test_the_pareto_front_has_no_candidate_that_another_beats():
    def candidate(number, size, kl):
        value = Number(value=kl, unit="nats", standard_error=0.1, ci95=(kl, kl))
        return SweepCandidate(
            number=number, name=str(number), folder="", bytes_on_disk=size, numbers={"kl": value}
        )

    points = [(10, 0.5), (20, 0.1), (20, 0.2), (30, 0.1), (None, 0.0), (40, 0.05), (10, 0.5)]
    front = pareto_front([candidate(number, *point) for number, point in enumerate(points)], "kl")
    assert front == {0, 1, 5, 6}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("models/Q4_K_M.gguf", "q4-k-m"),
        ("org/Model-7B", "model-7b"),
        ("a/../", "model"),
        ("org/repo:x.gguf", "x"),
    ],
)
def test_slugs_are_names_of_folders(name, expected):
    assert slug(name) == expected


@pytest.fixture
def own_sweep(result, job, tmp_path):
    """A copy of the finished sweep, in another place."""
    return Path(shutil.copytree(Path(str(job.out)), tmp_path / "copy"))


def edit_a_number(root):
    content = json.loads((root / "sweep.json").read_text())
    content["candidates"][0]["numbers"]["kl_policy_reference"]["value"] = 7.0
    (root / "sweep.json").write_text(json.dumps(content))


def exchange_two_runs(root):
    first, other = sorted(path for path in (root / "candidates").iterdir() if "another" not in path.name)[:2]
    shutil.rmtree(first)
    shutil.copytree(other, first)


def remove_the_checksums(root):
    (root / "checksums.jsonl").unlink()


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (edit_a_number, r"sweep\.json is damaged"),
        (exchange_two_runs, "is not the measurement of candidate 1"),
        (remove_the_checksums, r"checksums\.jsonl has no checksum"),
    ],
)
def test_a_sweep_that_is_not_as_it_was_written_is_not_reported(own_sweep, damage, match):
    write_report_of(own_sweep)
    damage(own_sweep)
    with pytest.raises(RunFolderError, match=match):
        write_report_of(own_sweep)


def test_a_sweep_goes_on_in_another_place(job, result, own_sweep):
    unfinished = own_sweep / result.candidates[1].folder
    (unfinished / "measurement.json").unlink()
    kept = [own_sweep / result.candidates[at].folder / "measurement.json" for at in (0, 3)]
    written = [path.read_bytes() for path in kept]
    again = sweep(**{**vars(job), "out": str(own_sweep), "resume": True})
    assert [path.read_bytes() for path in kept] == written
    assert again.candidates[0].numbers == result.candidates[0].numbers
    assert again.candidates[1].numbers == result.candidates[1].numbers
    assert Sweep.read(own_sweep).to_dict() == again.to_dict()
