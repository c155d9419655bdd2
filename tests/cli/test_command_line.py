"""The words of the command line: what they mean, what is answered to those that mean nothing, and help."""

import signal
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from command_words import words

from kleash.cli import entry, main
from kleash.cli.parsing import DRY_RUNS, EXAMPLES, RECORDS, SYNONYMS, parser_of, read_words
from kleash.errors import OptionError
from kleash.jobs import MeasureJob, PPOJob
from kleash.jobs.option_groups import OPTION_HEADINGS
from kleash.jobs.reading_jobs import AuditJob, CompareJob


def failing(capsys, *words):
    """What is said on standard error, in one line, by a command that ends with 2."""
    assert main(list(words)) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("kleash: ") and told.err.count("\n") == 1
    return told.err.strip()


@pytest.mark.parametrize(
    ("words", "near", "look"),
    [
        ("mesure", "did you mean measure?", "kleash --help"),
        ("grpo", "kleash train grpo", ""),
        ("measure --polcy x", "did you mean --policy?", "kleash measure --help"),
        ("measure --model x", "did you mean --policy?", "kleash measure --help"),
        ("sweep --prompts x", "--prompts, which is one of measure, train ppo, ", "kleash sweep --help"),
        ("train ppo --whiten", "did you mean --no-whiten?", "kleash train ppo --help"),
        ("train ppo --dry-run", "train ppo has no option --dry-run. See", ""),
        ("measure --limit x", "--limit takes a whole number; it is 'x'", "kleash measure --help"),
        ("measure --limit 99999999999999999999", "below 2^63", ""),
        ("measure --quiet=1", "--quiet ignored explicit argument '1'", "kleash measure --help"),
        ("measure stray", "was given 'stray'", "kleash measure --help"),
        ("report", "needs FOLDER", "kleash report --help"),
        ("measure --text a --prompts b", "not --prompts and --text", ""),
        ("--completion tcsh", "takes bash, zsh, fish", ""),
        ("measure --limit", "--limit expected one argument", "kleash measure --help"),
        ("--policy x", "a command and its algorithm come first", "kleash --help"),
        ("train demonstration", "examples/leash_demonstration.py", ""),
        ("measure --shard 3/8", "in every array task", ""),
        ("logits x", "kleash measure --policy MODEL --reference-cache FILE", ""),
        ("train grpo --clip-range 0.1", "--set epsilon=VALUE", "kleash train grpo --help"),
        ("train dpo --pairs p --max-gradient-norm 2", "--set max_grad_norm=VALUE", ""),
        ("train grpo --top-entropy-quantile .2", "is given by --set top_entropy_quantile=VALUE", ""),
        ("train grpo --num-generations 4", "did you mean --samples-per-prompt?", ""),
        ("train ppo --learning-rate -1e-3", "above 0; it is -0.001", ""),
        ("measure --samples_per_prmpt 2", "did you mean --samples-per-prompt?", "kleash measure --help"),
        ("measure -5", "was given '-5'", "kleash measure --help"),
    ],
)
def test_a_typo_is_answered_by_what_was_meant_and_where_to_look(words, near, look, capsys):
    told = failing(capsys, *words.split())
    assert near in told and look in told
    assert "None" not in told


def test_words_are_read_as_they_were_written():
    def read(words):
        return read_words(words.split())

    measure = read("measure --text a --policy=b --batch_tokens 2 --top-p None --temperature 1e-1 --quiet")
    assert measure == MeasureJob(text="a", policy="b", batch_tokens=2, temperature=0.1, quiet=True)
    assert read("compare a b --json c") == CompareJob(folders=(Path("a"), Path("b"), Path("c")), json=True)
    audit = read("audit --set kind=k3 x=-1 --fail-on fault note --convention loss pkg:f")
    assert (audit.set, audit.fail_on) == (("kind=k3", "x=-1"), ("fault", "note"))
    assert read("audit --quiet pkg:f") == AuditJob(target="pkg:f", quiet=True)
    assert read("audit") == AuditJob()
    ppo = read("train ppo --no-whiten --reward a --clip-range-value None --limit 3 --reward b c")
    assert ppo == PPOJob(whiten=False, reward=("a", "b", "c"), clip_range_value=None, limit=3)


@pytest.mark.parametrize(
    ("words", "begins", "code"),
    [
        ("", "usage: kleash COMMAND", 2),
        ("help", "usage: kleash COMMAND", 0),
        ("help train ppo", "usage: kleash train ppo [options]", 0),
        ("train", "usage: kleash train ALGORITHM [options]", 2),
        ("measure --policy x --help", "usage: kleash measure [options]", 0),
        ("train ppo -h", "usage: kleash train ppo [options]", 0),
        ("--version", "kleash 0.", 0),
        ("-V", "kleash 0.", 0),
    ],
)
def test_help_and_version_are_printed(words, begins, code, capsys):
    assert main(words.split()) == code
    printed = capsys.readouterr()
    assert printed.out.startswith(begins) and printed.err == ""


@pytest.mark.parametrize(("name", "job"), [("", MeasureJob()), ("train", PPOJob(steps=10))])
def test_what_has_no_command_yet_shows_one_that_needs_no_file(name, job, capsys):
    assert main(name.split()) == 2
    example = capsys.readouterr().out.rstrip().rpartition("Example: kleash ")[2]
    assert read_words(example.split()) == job


@pytest.mark.parametrize("name", DRY_RUNS)
def test_the_example_of_a_command_runs_as_it_stands(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*EXAMPLES[name].split()[1:], "--dry-run"]) == 0
    assert "shipped:reference" in capsys.readouterr().out


VALUES = {"N": ("1", "2"), "X": ("0.5", "0.25")}


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in RECORDS for option in (*parser_of(name).options, "--config")],
)
def test_a_repeated_option_collects_its_values_or_is_refused(name, option):
    """Nothing that was typed is dropped in silence, with "=" and with either spelling of a dash."""
    parser = parser_of(name)
    action = parser._option_string_actions[option]
    first, second = VALUES.get(str(action.metavar), ("a", "b"))
    positionals = ["a", "b"][: len(parser.positionals)]
    if action.nargs == 0:
        value = parser.read([*positionals, option, option])[action.dest]
        assert value is not option.startswith("--no-")
    elif action.nargs == "*":
        words = [*positionals, option, first, f"{option}={second}", option, first, second]
        assert parser.read(words)[action.dest] == (first, second, first, second)
    else:
        underscored = "--" + option[2:].replace("-", "_")
        for again in ([option, second], [f"{option}={second}"], [underscored, second], [option, first]):
            with pytest.raises(OptionError) as refused:
                parser.read([option, first, *again, *positionals])
            sentence = f"{option} takes one value, and was given two: {first} and {again[-1].split('=')[-1]}."
            assert str(refused.value) == f"{sentence} See kleash {name} --help"


def test_help_has_every_option_once_under_a_heading_and_says_what_it_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in RECORDS:
        assert main([*name.split(), "--help"]) == 0
        essential = capsys.readouterr().out
        assert len(essential.splitlines()) < 90 and EXAMPLES[name] in " ".join(essential.split())
        assert main([*name.split(), "--help-all"]) == 0
        told = capsys.readouterr().out
        assert told.startswith(f"usage: kleash {name}") and "None" not in told.replace("None for no", "")
        assert "%" not in told and "SUPPRESS" not in told and max(map(len, told.splitlines())) <= 80
        for typed, option in parser_of(name).options.items():
            lines = [line for line in told.splitlines() if f"{line} ".startswith(f"  {typed} ")]
            assert len(lines) == 1, (name, typed)
            default = RECORDS[name].__dataclass_fields__[option.dest].default
            is_shown = default not in (None, ()) and not isinstance(default, bool)
            assert option.help and is_shown == option.help.endswith(f" [{default}]"), (name, typed)
    assert told.index("essentials") < told.index("sampling")
    assert main([]) == 2  # and shows what there is
    assert "commands" in capsys.readouterr().out


def test_the_tables_name_nothing_that_is_not_there():
    parsers = [parser_of(name) for name in RECORDS]
    there = {action.dest for parser in parsers for action in parser.options.values()}
    grouped = [name for names in OPTION_HEADINGS.values() for name in names.split()]
    assert set(grouped) <= there and len(set(grouped)) == len(grouped)
    assert set(SYNONYMS.values()) <= {option for parser in parsers for option in parser.options}
    for parser in parsers:
        assert not any({theirs, ours} <= set(parser.options) for theirs, ours in SYNONYMS.items())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("measure --prompts p --window 9 --stride 4", "--window does nothing with --prompts"),
        ("measure --text t --samples-per-prompt 2", "--samples-per-prompt does nothing with --text"),
        ("measure --responses r --top-p 0.9", "--top-p does nothing with --responses"),
        ("measure --text t --temperature 0", "nothing is decoded"),
        ("measure --revision-policy main", "--revision-policy does nothing for shipped:policy"),
        ("train ppo --beta-min 0.1", "--beta-min does nothing with a fixed beta"),
        ("train rloo --target-per token", "--target-per does nothing without --target-nats"),
        ("train grpo --target-nats 4", "--target-nats moves no beta without --controller"),
        ("train distill --metric-names trl", "--metric-names does nothing without --report-to"),
    ],
)
def test_an_option_without_effect_is_named(words, told):
    request = read_words(words.split())
    assert any(told in sentence for sentence in request.without_effect())


def test_options_with_an_effect_are_not():
    for line in (
        "measure",
        "measure --top-p 0.9 --seed 4 --samples-per-prompt 2 --max-new-tokens 5 --temperature 0.7",
        "measure --text t --window 9 --stride 3 --limit 2 --temperature 0.7",
        "measure --responses r --temperature 0.7 --limit 4",
        "cache --text t --window 9",
        "train ppo --controller pid --target-nats 4 --target-per token --beta-min 0.01 --report-to tensorboard",
        "train grpo --on-hacking tighten --beta-max 0.1",
    ):
        job = read_words(line.split())
        assert (job.measurement() if line.startswith("cache") else job).without_effect() == ()


def test_an_option_without_effect_and_the_shipped_pair_are_said_before_anything_is_read(tmp_path, capsys):
    assert main(words("measure", policy="shipped:policy", prompts="no", window=9, out=tmp_path)) == 2
    pair, useless, missing = capsys.readouterr().err.splitlines()
    assert pair.startswith("this measures the small pair that ships with kleash;")
    assert "--window does nothing with --prompts" in useless and "there is no file" in missing


def test_missing_packages_of_a_command_are_named_together(monkeypatch, capsys):
    gone = {"transformers", "trl", "datasets", "accelerate", "ray", "wandb"}
    monkeypatch.setattr("kleash.extras.is_installed", lambda name: name not in gone)
    for line, told in {
        "cache": "transformers is not installed; run: pip install 'kleash[models]'",
        "measure --engine ray": "transformers and ray are not installed; run: pip install 'kleash[ray]'",
        "train grpo": "transformers, accelerate, trl and datasets are not installed; run: pip install 'kleash[trl]'",
        "train ppo --report-to wandb": "transformers and accelerate are not installed; run: pip",
    }.items():
        assert told in failing(capsys, *line.split())
    gone.clear()
    gone.add("wandb")
    assert failing(capsys, "train", "dpo", "--pairs", "x", "--report-to", "wandb") == (
        "kleash: wandb is not installed; run: pip install wandb"
    )


@pytest.fixture
def default_signals():
    """The handlers that Python starts with; a shell starts its background jobs with SIGINT ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "kleash: interrupted\n"), (signal.SIGTERM, 143, "kleash: terminated by SIGTERM\n")],
)
def test_signals_end_a_command_with_a_line_and_their_exit_code(number, code, line, monkeypatch, capsys):
    def interrupted(words):
        signal.raise_signal(number)

    def interrupted_in_an_import(words):
        try:
            interrupted(words)
        except KeyboardInterrupt as stop:
            raise ImportError("the C extensions failed") from stop

    handlers = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)]
    for run in (interrupted, interrupted_in_an_import):
        monkeypatch.setattr(entry, "_run", run)
        assert (entry.main(["measure"]), capsys.readouterr().err) == (code, line)
    assert [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_lack_of_memory_or_of_a_process_is_a_line(monkeypatch, capsys):
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8.00 GiB.")
    process = RuntimeError("[/src/gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9. GLHF!")
    monkeypatch.setattr(entry, "_run", Mock(side_effect=[memory, process]))
    assert "Tried to allocate 2.00 GiB; give a smaller --batch-tokens, " in failing(capsys, "measure")
    assert "gone (Connection closed by peer [127.0.0.1]:9), and its own " in failing(capsys, "measure")
    for allocate, lack in (
        (torch.empty, "can't allocate memory: you tried to allocate 4000000000000000 bytes"),
        (np.empty, "Unable to allocate 7.11 PiB for an array with shape"),
        (bytearray, "kleash: no more memory can be allocated"),
    ):
        monkeypatch.setattr(entry, "_run", lambda _, allocate=allocate: allocate(10**15))
        assert lack in (line := failing(capsys, "measure")) and "or more memory" in line


READING = ("report A", "compare A B", "mismatch A", "doctor A", "audit A:b")


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("words", ("measure --limit 0", "measure", *READING))
def test_of_several_processes_the_first_prints(words, monkeypatch, capsys):
    """Another only an error, if no launcher ends it before; it does not read, or write the page of the first again."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    waits, takes_part = [], words.startswith("measure")
    ends = Mock(side_effect=lambda _: signal.raise_signal(signal.SIGTERM))
    for rank, wait, code, lines in (("0", ends, 2, 1), ("1", ends, 143, 0), ("1", waits.append, 2, 1)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(entry.time, "sleep", wait)
        told = entry.main(words.split()), capsys.readouterr().err.count("kleash: ")
        assert told == ((code, lines) if takes_part or rank == "0" else (0, 0))
    assert waits == [entry.FIRST_PRINTS_S] * takes_part


def test_a_command_of_one_process_is_refused_by_a_launcher(tmp_path, monkeypatch, capsys):
    """Otherwise the lock of one process would stop another, and torchrun would then end the one that works."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    line = "kleash: kleash cache takes one process and was launched with 3; start one, or unset RANK and WORLD_SIZE\n"
    for rank, expected in (("0", line), ("2", "")):
        monkeypatch.setenv("RANK", rank)
        assert main(["cache", "--out", str(tmp_path / "OUT")]) == 2
        assert tuple(capsys.readouterr()) == ("", expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("default_signals")
def test_a_launcher_may_repeat_a_signal(monkeypatch, capsys):
    """torchrun sends its processes the Ctrl-C that they got from the terminal."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def interrupted_twice(words):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            print("saved")

    monkeypatch.setattr(entry, "_run", interrupted_twice)
    for rank, line in (("0", "kleash: interrupted\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert entry.main(["measure"]) == 130
        assert tuple(capsys.readouterr()) == ("saved\n", line)
