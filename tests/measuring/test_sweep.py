"""``kleash sweep``: candidates against one reference, their ranking, and what happens to those that fail."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from command_forks import CommandForks
from safetensors.torch import load_file
from tiny_models import save_tiny, tiny_tokenizer

from kleash.cli import main
from kleash.cli.printing import print_summary
from kleash.errors import Interrupted, ModelError, OptionError, RunFolderError
from kleash.jobs import SweepJob
from kleash.jobs.sweep import slug
from kleash.measuring import MeasureJob, compare, measure, sweep, sweep_run
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.reference_cache import is_cached
from kleash.measuring.sweep_ranking import pareto_front
from kleash.reports.folder_report import write_report_of
from kleash.store import Number
from kleash.store.sweep import Sweep, SweepCandidate

Kleash = Callable[..., subprocess.CompletedProcess[str]]
WINDOWS = {"window": 128, "batch_tokens": 1024}
DOCUMENTS = [
    " ".join(f"Boat {n} went out {n * k + k} times before the sun had come up;" for k in range(2))
    for n in range(34)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def job(folder: Path) -> SweepJob:
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
def result(job: SweepJob) -> Sweep:
    return sweep(job)


def test_a_candidate_has_the_numbers_of_its_own_measurement(
    job: SweepJob, result: Sweep, folder: Path
) -> None:
    options = {"policy": job.candidates[0], "reference": job.reference, "text": job.text, **WINDOWS}
    alone = measure(MeasureJob(out=str(folder / "alone"), **options))
    candidate = result.candidates[0]
    for name in ("kl_policy_reference", "kl_reference_policy", "top1_agreement"):
        assert candidate.numbers[name].value == pytest.approx(alone.statistics()[name].value, rel=1e-6)
    quantile = alone.quantiles["kl_policy_reference"]["99.9"]
    assert candidate.numbers["kl_policy_reference_99.9"].value == pytest.approx(quantile.value, rel=1e-5)
    assert result.tokens == alone.counts.tokens
    tensors = load_file(folder / "far" / "model.safetensors").values()
    assert candidate.bytes_on_disk == sum(4 * tensor.numel() for tensor in tensors)
    assert candidate.bits_per_weight == 32


def test_candidates_are_ranked_with_ties(result: Sweep) -> None:
    assert [Path(candidate.name).name for candidate in result.ranking] == ["near", "copy-of-near", "far"]
    assert [candidate.letters for candidate in result.candidates] == ["b", "a", "", "a"]
    tie = next(pair for pair in result.pairs if pair.is_tie)
    assert (tie.first, tie.second, tie.simultaneous_ci95) == (2, 4, (0.0, 0.0))


def test_a_pair_has_the_paired_difference_of_compare(job: SweepJob, result: Sweep) -> None:
    out = Path(str(job.out))
    comparison = compare([out / result.candidates[1].folder, out / result.candidates[0].folder])
    pair = result.pairs[0]
    assert (pair.first, pair.second) == (1, 2)
    expected = comparison.differences[0].differences["kl_reference_policy"]
    assert pair.difference.value == pytest.approx(expected.value, rel=1e-12)
    assert pair.difference.standard_error == pytest.approx(expected.standard_error, rel=1e-9)


def test_a_candidate_with_another_tokenizer_is_named_and_the_others_are_kept(
    job: SweepJob, result: Sweep
) -> None:
    (failed,) = result.failed
    assert failed.number == 3 and "token" in failed.failure
    assert Sweep.read(Path(str(job.out))).to_json() == result.to_json()
    page = (Path(str(job.out)) / "sweep.html").read_text()
    assert "Not measured" in page and 'href="candidates/01-far/report.html"' in page


def test_without_a_candidate_the_reference_is_not_run(folder: Path, tmp_path: Path) -> None:
    job = SweepJob(
        candidates=(str(folder / "q4.gguf"), str(folder / "q5" / "model")),
        reference=str(folder / "base"),
        text=str(folder / "text.txt"),
        out=str(tmp_path / "none"),
    )
    with pytest.raises(ModelError, match=r"no candidate can be found: .*q4\.gguf"):
        sweep(job)
    assert not (tmp_path / "none" / "reference-cache").exists()


def test_a_missing_candidate_is_named_before_the_reference_is_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []

    class Notes(ProgressReporter):
        def note(self, sentence: str) -> None:
            notes.append(sentence)

    def stop(*_: object) -> None:
        raise OptionError("the reference would be run now")

    monkeypatch.setattr(sweep_run, "_cache_reference", stop)
    job = SweepJob(
        candidates=(str(folder / "base"), str(folder / "typo.gguf")),
        reference=str(folder / "base"),
        text=str(folder / "text.txt"),
        out=str(tmp_path / "one"),
    )
    with pytest.raises(OptionError, match="would be run now"):
        sweep(job, Notes())
    assert [note for note in notes if "typo.gguf" in note]


def test_a_resumed_sweep_keeps_what_is_finished_and_takes_more_candidates(
    job: SweepJob, result: Sweep, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Path(str(job.out)) / result.candidates[0].folder / "measurement.json"
    written = measured.stat().st_mtime_ns
    save_tiny(folder / "third", apart=0.1)

    def load_again(*_: object) -> None:
        raise AssertionError("the reference was loaded although its cache is finished")

    monkeypatch.setattr("kleash.measuring.reference_cache.load_reference", load_again)
    again = sweep(
        SweepJob(**{**vars(job), "resume": True, "candidates": (*job.candidates, str(folder / "third"))})
    )
    assert measured.stat().st_mtime_ns == written
    assert again.candidates[0].numbers == result.candidates[0].numbers
    assert [Path(candidate.name).name for candidate in again.ranking] == [
        "near",
        "copy-of-near",
        "third",
        "far",
    ]
    other_weights = SweepJob(**{**vars(job), "resume": True, "candidates": (str(folder / "third"),)})
    assert other_weights.folder_of(1) != job.folder_of(1)


@pytest.mark.parametrize(
    ("options", "difference"),
    [({"temperature": 0.5}, "--temperature was 1.0 and is now 0.5"), ({"text": "copy"}, "--text was")],
)
def test_other_options_leave_the_sweep_as_it_is(
    job: SweepJob, result: Sweep, tmp_path: Path, options: dict[str, object], difference: str
) -> None:
    """The cache of the reference fits these options, and no candidate's run does."""
    if options.get("text"):
        options = {"text": str(shutil.copy(str(job.text), tmp_path / "copy.txt"))}
    written = (Path(str(job.out)) / "sweep.json").read_bytes()
    with pytest.raises(RunFolderError, match=f"01-far holds another run: {difference}.*give another --out"):
        sweep(SweepJob(**{**vars(job), **options, "resume": True}))
    assert (Path(str(job.out)) / "sweep.json").read_bytes() == written


def test_a_long_name_does_not_narrow_the_numbers_in_the_terminal(
    result: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [
        replace(candidate, name="/" + 300 * "x" + Path(candidate.name).name)
        for candidate in result.candidates
    ]
    print_summary(replace(result, candidates=tuple(long)), Path("sweep.html"))
    printed = capsys.readouterr().out
    assert len(re.findall(r"nats +\d\.\d+ to \d\.\d+ ", printed)) == 3
    lines = printed[: printed.index("Not measured")].splitlines()
    assert max(len(line) for line in lines if "rows of a head" not in line) < 180


def test_candidates_of_one_last_name_in_another_order_leave_the_sweep_as_it_is(
    job: SweepJob, result: Sweep, folder: Path
) -> None:
    written = (Path(str(job.out)) / "sweep.json").read_bytes()
    moved = (str(folder / "elsewhere" / "far"), *job.candidates[1:])
    with pytest.raises(
        RunFolderError, match=r"01-far holds another run: --policy was .*; give another --out"
    ):
        sweep(SweepJob(**{**vars(job), "candidates": moved, "resume": True}))
    assert (Path(str(job.out)) / "sweep.json").read_bytes() == written


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"window": 64}, False),
        ({"temperature": 0.5}, False),
        ({"dtype": "float64"}, False),
    ],
)
def test_a_cache_of_other_options_is_not_the_cache_of_a_sweep(
    job: SweepJob, result: Sweep, options: dict[str, object], expected: bool
) -> None:
    cache_job = SweepJob(**{**vars(job), **options}).cache_job(Path(str(job.out)))
    assert is_cached(cache_job) == expected


def test_a_finished_candidate_whose_files_changed_is_not_kept(
    folder: Path, result: Sweep, job: SweepJob
) -> None:
    save_tiny(folder / "moving", apart=0.05)
    options = {**vars(job), "candidates": (str(folder / "moving"),), "out": str(folder / "moved")}
    sweep(SweepJob(**options))
    save_tiny(folder / "moving", apart=0.1)
    (failed,) = sweep(SweepJob(**{**options, "resume": True})).candidates
    assert "fingerprint" in failed.failure


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_holds_something_else_is_refused(
    job: SweepJob, result: Sweep, tmp_path: Path, resume: bool
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="no sweep to resume" if resume else "holds other files"):
        sweep(SweepJob(**{**vars(job), "out": str(tmp_path), "resume": resume}))
    with pytest.raises(RunFolderError, match="--resume"):
        sweep(job)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_copies_of_the_reference_differ_by_exactly_0(folder: Path) -> None:
    copy = shutil.copytree(folder / "base", folder / "copy-of-base")
    result = sweep(
        SweepJob(
            candidates=(str(folder / "base"), str(copy)),
            reference=str(folder / "base"),
            text=str(folder / "text.txt"),
            out=str(folder / "copies"),
            **WINDOWS,
        )
    )
    (pair,) = result.pairs
    assert pair.is_tie and pair.simultaneous_ci95 == (0, 0) and not pair.difference.warnings


def test_a_candidate_whose_run_is_damaged_fails_and_the_others_are_ranked(
    job: SweepJob, result: Sweep, folder: Path
) -> None:
    part = next((Path(str(job.out)) / result.candidates[1].folder / "tokens").glob("part-*.parquet"))
    content = part.read_bytes()
    try:
        part.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        again = sweep(SweepJob(**{**vars(job), "resume": True}))
        assert "is damaged" in again.candidates[1].failure
        assert [candidate.number for candidate in again.ranking] == [4, 1]
    finally:
        part.write_bytes(content)


def test_ctrl_c_names_the_command_that_resumes(
    job: SweepJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kleash.measuring.sweep_run.cache_reference", interrupt)
    with pytest.raises(Interrupted, match=f"--resume --out {tmp_path / 'new'}"):
        sweep(SweepJob(**{**vars(job), "out": str(tmp_path / "new")}))


def test_the_command_exits_with_2_if_a_candidate_failed(
    job: SweepJob, result: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "--reference", job.reference, "--text", job.text, "--out", job.out, "--resume"]
    words += [word for name, value in WINDOWS.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert main([*map(str, words), "--candidates", *job.candidates, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["candidates"][2]["failure"]
    assert "could not be measured" in printed.err


@pytest.mark.parametrize(("is_own", "code"), [(True, 2), (False, 0)])
def test_a_process_that_another_one_ranked_for_ends_with_0(
    result: Sweep,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_own: bool,
    code: int,
) -> None:
    monkeypatch.setattr(sweep_run, "sweep_together", lambda *_: (result, is_own))
    assert result.failed
    assert main(["sweep", "--candidates", "a", "--out", "b"]) == code
    assert bool(capsys.readouterr().out) is is_own


def test_two_commands_on_one_folder_rank_as_one_does(
    job: SweepJob, result: Sweep, command_forks: CommandForks, tmp_path: Path
) -> None:
    words = [
        "sweep",
        "--reference",
        str(job.reference),
        "--text",
        str(job.text),
        "--out",
        str(tmp_path / "out"),
    ]
    words += [str(word) for name, value in WINDOWS.items() for word in (f"--{name.replace('_', '-')}", value)]
    commands = [
        command_forks.start([*words, "--json", "--candidates", *map(str, job.candidates)]) for _ in range(2)
    ]
    ended = [(process.communicate(), process.returncode) for process in commands]
    assert sorted(code for _, code in ended) == [0, 2], ended
    assert [bool(output) for (output, _), code in ended if code == 0] == [False]
    shared = Sweep.read(tmp_path / "out")
    assert [x.numbers for x in shared.candidates] == [x.numbers for x in result.candidates]
    assert shared.pairs == result.pairs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name the models"),
        ({"candidates": ("a", "a"), "text": "t"}, "twice"),
        ({"candidates": ("http://host/v1",), "text": "t"}, "is a server"),
        ({"candidates": ("a",), "reference": "b"}, "--text or --responses"),
        ({"candidates": ("a",), "text": "t", "direction": "k3"}, "--direction must be one of"),
        ({"candidates": ("a",), "reference": "b", "text": "t", "responses": "r"}, "--text and --responses"),
        ({"candidates": ("a",), "text": "t", "limit": 0}, "--limit must be at least 1"),
    ],
)
def test_jobs_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SweepJob(**options)  # type: ignore[arg-type]


def test_the_pareto_front_has_no_candidate_that_another_beats() -> None:
    def candidate(number: int, size: int | None, kl: float) -> SweepCandidate:
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
def test_slugs_are_names_of_folders(name: str, expected: str) -> None:
    assert slug(name) == expected


@pytest.fixture
def own_sweep(result: Sweep, job: SweepJob, tmp_path: Path) -> Path:
    """A copy of the finished sweep, in another place."""
    return Path(shutil.copytree(Path(str(job.out)), tmp_path / "copy"))


def edit_a_number(root: Path) -> None:
    content = json.loads((root / "sweep.json").read_text())
    content["candidates"][0]["numbers"]["kl_policy_reference"]["value"] = 7.0
    (root / "sweep.json").write_text(json.dumps(content))


def exchange_two_runs(root: Path) -> None:
    first, other = sorted(path for path in (root / "candidates").iterdir() if "another" not in path.name)[:2]
    shutil.rmtree(first)
    shutil.copytree(other, first)


def remove_the_checksums(root: Path) -> None:
    (root / "checksums.jsonl").unlink()


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (edit_a_number, r"sweep\.json is damaged"),
        (exchange_two_runs, "is not the measurement of candidate 1"),
        (remove_the_checksums, r"checksums\.jsonl has no checksum"),
    ],
)
def test_a_sweep_that_is_not_as_it_was_written_is_not_reported(
    own_sweep: Path, damage: Callable[[Path], None], match: str
) -> None:
    write_report_of(own_sweep)
    damage(own_sweep)
    with pytest.raises(RunFolderError, match=match):
        write_report_of(own_sweep)


def test_a_sweep_goes_on_in_another_place(job: SweepJob, result: Sweep, own_sweep: Path) -> None:
    unfinished = own_sweep / result.candidates[1].folder
    (unfinished / "measurement.json").unlink()
    kept = [own_sweep / result.candidates[at].folder / "measurement.json" for at in (0, 3)]
    written = [path.read_bytes() for path in kept]
    again = sweep(SweepJob(**{**vars(job), "out": str(own_sweep), "resume": True}))
    assert [path.read_bytes() for path in kept] == written
    assert again.candidates[0].numbers == result.candidates[0].numbers
    assert again.candidates[1].numbers == result.candidates[1].numbers
    assert Sweep.read(own_sweep).to_dict() == again.to_dict()
