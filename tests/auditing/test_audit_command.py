"""``kleash audit`` and the pytest fixture, end to end."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kleash.auditing import CONVENTIONS, audits_of, cases_of
from kleash.auditing.targets import find_target, target_names
from kleash.cli import main
from kleash.errors import CannotRunError, OptionError

USER_MODULE = """
def k3(token_logp, token_logq):
    return (token_logq - token_logp).exp() - 1 - (token_logq - token_logp)

def scaled(token_logp, token_logq, by=1.0):
    log_ratio = token_logp.float() - token_logq.float()
    return by * log_ratio**2 / 2

def broken(token_logp, token_logq):
    raise RuntimeError("no reference model is loaded")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of functions."""
    (tmp_path / "user_kl.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("user_kl", None)
    return tmp_path


def test_the_command_prints_the_verdict_and_writes_a_page(project, capsys):
    assert main(["audit", "user_kl:k3", "--convention", "loss"]) == 0
    said = capsys.readouterr().out
    assert "follows KL(q ‖ p) token by token, not KL(p ‖ q)" in said
    assert "faults: wrong_gradient (wrong)" in said and "change wrong_gradient: use kleash.kl_loss" in said
    assert "1 function audited, 1 with faults" in said and "p is the policy, q the reference" in said
    assert "wrong_gradient" in (project / "audit.html").read_text()


def test_fail_on_kinds_and_severities(project, capsys):
    words = ["audit", "user_kl:k3", "--convention", "loss", "--quiet", "--fail-on"]
    assert main([*words, "wrong_gradient"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kleash: user_kl:k3 fails: wrong_gradient: ")
    assert main([*words, "zero_gradient", "wrong_sign"]) == 0
    assert main([*words, "zero_gradient,wrong"]) == 1, "kinds and severities, with commas between"


def test_a_missing_convention_explains_the_common_ones(project, capsys):
    assert main(["audit", "user_kl:k3"]) == 2
    said = capsys.readouterr().err
    assert "\n  f(token_logp, token_logq): loss, sequence_loss, " in said, "a line for each call"
    assert "docs/" not in said, "a file that no installed package has"
    assert all(name in said for name in CONVENTIONS) and max(map(len, said.splitlines())) < 200


def test_a_base_install_audits(project):
    code = (
        "import sys\n"
        "denied = ('rich', 'transformers', 'tokenizers', 'safetensors', 'pyarrow', 'matplotlib', 'peft', 'scipy')\n"
        "sys.modules.update(dict.fromkeys(denied))\n"
        "from kleash.cli import main\n"
        "words = ['audit', 'user_kl:k3', '--convention', 'loss']\n"
        "assert main(words) == 0\n"
        "assert not {'trl', 'verl', 'openrlhf', 'ray', 'torch._dynamo'} & set(sys.modules), 'slow imports'\n"
        "print('json:')\n"
        "assert main([*words, '--json']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text, _, as_json = done.stdout.partition("json:")
    assert "KL(q ‖ p)" in text and json.loads(as_json)["audits"]
    assert "is not installed" in done.stderr and not (project / "audit.html").exists()


def test_arguments_are_bound_and_recorded(project, capsys):
    words = ["audit", "user_kl:scaled", "--convention", "loss", "--json", "--set", "by=2"]
    assert main(words) == 0
    (found,) = json.loads(capsys.readouterr().out)["audits"]
    assert found["arguments"] == {"by": "2"}
    assert found["target"] == "user_kl:scaled" and found["gradient"] == "2 x KL(p ‖ q)"
    assert "wrong_gradient" in [finding["kind"] for finding in found["findings"]], "twice the gradient"
    page = (project / "audit.html").read_text()
    assert "kleash audit user_kl:scaled --convention loss --set by=2" in page


def test_output_of_the_audited_code_goes_to_stderr(project, capsys):
    chatty = "\n\ndef chatty(p, q):\n    print('step')\n    return p - q\n\nprint('imported')\n"
    (project / "user_kl.py").write_text(USER_MODULE + chatty)
    assert main(["audit", "user_kl:chatty", "--convention", "reward", "--json"]) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)["audits"]) == 1
    assert "step" in said.err and "imported" in said.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["user_kl:k3", "--convention", "loss", "--set", "by=2"], "unexpected keyword argument 'by'"),
        (["user_kl:k3", "--convention", "sequence_loss"], "the convention that fits it (loss, packed_loss)"),
        (["user_kl:broken", "--convention=loss", "--fail-on=zero_gradents"], "did you mean 'zero_gradient'?"),
        (["unknown"], "no target is called 'unknown'; there are trl, verl, openrlhf, liger, nemo-rl, skyrl"),
        (["verl", "--convention", "loss"], "verl brings its own conventions and arguments"),
        (["nemo-rl"], "run: git clone --depth 1 https://github.com/NVIDIA-NeMo/RL, and give its folder as"),
        (["trl", "--source", ".", "--trust-source"], "trl is audited as it is installed; a function of a"),
        (["nemo", "--source", ".", "--trust-source"], "no target is called 'nemo'; there are trl, "),
        (["kleash", "--trust-source"], "--trust-source needs --source, the folder of a checkout"),
        (["a.py:f", "--source", "not_there", "--trust-source"], "there is no folder "),
    ],
)
def test_errors_are_one_line_on_stderr(project, capsys, words, sentence):
    assert main(["audit", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kleash: ") and said.err.count("\n") == 1
    assert sentence in said.err and not (project / "audit.html").exists()


def test_cases_named_in_the_help_exist(capsys):
    main(["audit", "--help"])
    named = re.findall(rf"\b({'|'.join(target_names())}):([\w+]+)", capsys.readouterr().out)
    assert named
    assert all(name in {case.name for case in find_target(package).cases} for package, name in named)


def test_one_of_several_cases_that_cannot_be_called_is_a_finding(project):
    cases = (*cases_of("user_kl:broken", "loss"), *cases_of("user_kl:k3", "loss"))
    with pytest.raises(CannotRunError, match="no reference model"):
        list(audits_of(cases[:1]))
    first, second = audits_of(cases)
    assert [(each.kind, each.severity) for each in first.faults] == [("cannot_be_called", "wrong")]
    assert "no reference model is loaded" in first.verdict[0]
    assert second.value == "KL(p ‖ q)"
    with pytest.raises(OptionError, match="give --convention"):
        cases_of("user_kl:k3")


PROJECT = """
from user_kl import k3, scaled

def test_gradient(kleash_audit):
    kleash_audit(k3, "loss")

def test_another_kind(kleash_audit):
    assert kleash_audit(k3, "loss", fail_on={"zero_gradient", "truncated,wrong_sign"}).gradient == "KL(q ‖ p)"

def test_right(kleash_audit):
    kleash_audit(scaled, "loss", arguments={"by": 1.0}, fail_on="wrong_gradient")

def test_misspelt(kleash_audit):
    kleash_audit(k3, "loss", fail_on={"zero_gradents"})
"""


def test_the_fixture_in_a_test_suite(project):
    (project / "test_user.py").write_text(PROJECT)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:jaxtyping"]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=300)
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "user_kl.k3, called as f(token_logp, token_logq) -> [sequences, steps], fails its" in done.stdout
    assert "  wrong_gradient: Backpropagated on-policy it follows KL(q ‖ p)" in done.stdout
    assert "no kind of finding is called 'zero_gradents'" in done.stdout
