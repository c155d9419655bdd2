"""Functions of a checkout: what of a file is executed, what is said of the rest, and the frameworks known by name."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkout_stand_ins import FILES, write_checkout
from target_values import close, mean, of

from kleash.auditing import audits_of, cases_of
from kleash.auditing.targets.checkouts import commit_of, load_function
from kleash.auditing.targets.repositories import REPOSITORIES
from kleash.cli import main
from kleash.errors import CannotRunError, MissingExtraError, OptionError, UnknownNameError
from kleash.reports.formatting import as_sentence

LOSSES = """
import not_there_at_all as absent, math
from not_there_at_all.deep import Batch, registered
from numpy.linalg import norm
from .helpers import shifted
from .division import halved
try:
    import also_not_there
except ImportError:
    also_not_there = None
from dataclasses import dataclass
import torch

SCALE = [1.0]
SCALE += [1.0]
SCALE[1] *= 2

@dataclass
class Settings:
    scale: "absent.Number" = SCALE[-1]
    kind: Batch = None

class Inherits(Batch):
    pass

@torch.compile(dynamic=True)
def k2_penalty(token_logp: Batch, token_logq: absent.Tensor):
    import pack.division as again
    assert again.halved is halved
    assert also_not_there is None and not isinstance(token_logp, Batch) and Inherits() and math.pi
    difference: absent.Local = token_logp - token_logq
    return halved(difference * difference)

def uses_missing(token_logp, token_logq):
    return shifted(token_logp) - token_logq

def compares_missing(token_logp, token_logq):
    return token_logp.where(token_logq != shifted.IGNORED, 0.0)
def compares_kinds(token_logp, token_logq, kind=Batch.KIND):
    return token_logp - token_logq if kind == absent.KIND else token_logq
def uses_own_numpy(token_logp, token_logq):
    return norm(token_logp)

def uses_nothing_defined(token_logp, token_logq):
    return k4_penalty(token_logp)

@registered("name")
def decorated(token_logp, token_logq):
    return token_logp

BROKEN = [][1]

def uses_broken(token_logp, token_logq):
    return BROKEN

class Estimator:
    @staticmethod
    def k2(teacher, policy):
        return (teacher - policy) ** 2 / 2

    def k1(self, token_logp, token_logq):
        return token_logp - token_logq

raise SystemExit("the whole module was executed")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A commit of stand-ins for the files of all frameworks, and of files of our own."""
    others = {
        "pack/losses.py": "\ufeff" + LOSSES,
        "pack/twice.py": "def halved(x): return x\n",
        "pack/division.py": "from . import losses\ndef halved(x): return x / losses.Settings().scale\nBROKEN = [][1]",
        "pack/not_python.py": "def f(:\n",
        "numpy/linalg.py": "",
        "stars/__init__.py": "from .inside import *\nfrom .absent import *\n",
        "stars/inside.py": "def halved(x): return x / 2\n",
        "stars/losses.py": "from math import *\nfrom stars import *\nfrom not_there import *\nHALF = halved(1)\n"
        "def k2(p, q): return HALF * fabs(p - q) * sum([fabs(p - q)])\ndef uses_nothing(p, q): return nowhere(p)\n",
        "deep/scipy/__init__.py": "",
        "deep/scipy/losses.py": "from scipy import special\ndef k1(p, q): return special.expit(p)\n",
    }
    return write_checkout(tmp_path_factory.mktemp("checkout"), {**FILES, **others})


def test_only_what_the_function_needs_is_executed(checkout):
    loaded = load_function(checkout, "pack/losses.py:k2_penalty")
    p, q = torch.tensor([1.0, 5.0]), torch.tensor([0.0, 2.0])
    assert loaded.function(p, q).tolist() == [0.5, 4.5]
    assert loaded.notes == (
        "runs `k2_penalty` of `pack/losses.py`, with its also_not_there, Inherits",
        "runs what it uses of pack/division.py, and of what these import",
        "stand-ins, whose use is an error, replace not_there_at_all.deep.Batch",
    )
    assert type(loaded.function).__name__ == "function", "it is not compiled"
    assert torch.compile.__module__ == "torch"
    assert not any(name.startswith("checkout:") for name in sys.modules)
    assert load_function(checkout, "pack:k2_penalty").file == "pack/losses.py"
    assert load_function(checkout, "stars/losses.py:k2").function(3.0, 1.0) == 2.0
    (of_a_class,) = audits_of(cases_of("pack/losses.py:Estimator.k2", "loss", source=checkout))
    call = "f.k1(SimpleNamespace(), token_logp, token_logq) -> reward"
    method = cases_of("pack/losses.py:Estimator", call, (), checkout)
    assert of_a_class.gradient == next(audits_of(method)).gradient == "KL(p ‖ q)"
    assert "Called with teacher = token_logp, policy = token_logq." in map(as_sentence, of_a_class.notes)


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("pack/losses.py", OptionError, "is written FILE:function"),
        ("pack/loses.py:k2", UnknownNameError, "there is no file pack/loses.py in "),
        ("../elsewhere.py:k2", UnknownNameError, "there is no file ../elsewhere.py in "),
        ("pack/losses.py:k1_penalty", UnknownNameError, "at its top level; did you mean k2_penalty?"),
        ("pack/losses.py:uses_nothing_defined", UnknownNameError, "uses_nothing_defined uses k4_penalty"),
        ("pack/losses.py:uses_broken", CannotRunError, "line 51, raises IndexError: list index"),
        ("pack/losses.py:uses_broken", CannotRunError, "; write what is audited into one file without"),
        ("pack/losses.py:decorated", MissingExtraError, "not_there_at_all.deep.registered is needed, but it"),
        ("pack/losses.py:Estimator.k1", OptionError, "name the class and write the call: f(…).k1(…)"),
        ("pack/not_python.py:f", CannotRunError, "pack/not_python.py is not Python: "),
        ("pack:halved", UnknownNameError, "2 files in "),
        ("pack:nothing", UnknownNameError, "no file in "),
    ],
)
def test_errors_of_loading(checkout, target, error, words):
    with pytest.raises(error) as caught:
        load_function(checkout, target)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("pack/losses.py:uses_missing", "uses_missing cannot be called: .helpers.shifted is needed, but"),
        ("pack/losses.py:compares_missing", ".helpers.shifted.IGNORED is needed, but it"),
        ("pack/losses.py:compares_kinds", "not_there_at_all.deep.Batch.KIND is needed, but it"),
        ("pack/losses.py:uses_own_numpy", "numpy.linalg.norm is needed, but it cannot be imported (Impor"),
        ("stars/losses.py:uses_nothing", "math.nowhere is needed, but it cannot be imported (ImportError: "),
        ("deep/scipy/losses.py:k1", "scipy.special.expit is needed, but it cannot be imported (ImportErr"),
    ],
)
def test_an_import_that_is_needed_says_what_was_used_of_it(checkout, target, words):
    with pytest.raises(CannotRunError, match=r"\); write it into one file with what is") as caught:
        list(audits_of(cases_of(target, "loss", source=checkout)))
    assert words in str(caught.value)


def test_the_commit_is_that_of_the_file_as_it_is(tmp_path):
    assert commit_of(write_checkout(tmp_path / "bare", {"a.py": ""}, commit=False), "a.py") == "no git commit"
    source = write_checkout(tmp_path / "git", {"pack/a.py": "x = 1\n", "b.py": ""})
    command = ["git", "-C", str(source), "log", "-1", "--format=%H"]
    git = subprocess.run(command, capture_output=True, text=True)
    assert commit_of(source, "b.py") == commit_of(source / "pack", "a.py") == f"commit {git.stdout.strip()}"
    (source / "pack/a.py").write_text("x = 2\n")
    assert commit_of(source, "pack/a.py") == f"commit {git.stdout.strip()}, with changes in pack/a.py"
    (source / "new.py").write_text("")
    assert commit_of(source, "new.py") == "no git commit"


ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")
OF_EACH_TOKEN = {
    **{f"nemo-rl:loss_{kind}": (kind, "attached") for kind in ("k1", "k2", "k3")},
    **{f"nemo-rl:loss_{kind}_approximation": (kind, "behaviour") for kind in ("k2", "k3")},
    **{f"nemo-rl:reward_{kind}": (kind, "") for kind in ("k1", "k2", "k3")},
    "nemo-rl:gen_kl_error": ("k3", ""),
    **{f"skyrl:loss_{kind}": (kind, "mask") for kind in ("k1", "abs", "k2", "k3")},
    **{f"skyrl:reward_{kind}": (kind, "mask") for kind in ("k1", "abs", "k2", "k3")},
    **{f"{name}:{kind}": (kind, "") for name in ("slime", "miles") for kind in ESTIMATORS},
    **{f"{name}:{kind}_unbiased": (kind, "behaviour") for name in ("slime", "miles") for kind in ESTIMATORS},
    **{f"{name}:reward_{kind}": (kind, "") for name in ("slime", "miles") for kind in ("k1", "low_var_kl")},
    "prime-rl:mismatch_kl": ("k3", ""),
    **{f"open-instruct:kl_estimator_{index}": (f"k{index + 1}", "") for index in range(3)},
    "open-instruct:kl_estimator_3": ("k1", "behaviour"),
}
"""Case -> the estimator of each token, and its weight: a ratio of value 1, p / behaviour, or the mask."""
OF_RESPONSES = (
    "prime-rl:ref_kl",
    *(f"torchtune:{name}KLLoss" for name in ("Forward", "Reverse", "Symmetric")),
    *(f"nemo-rl:distillation_{kind}" for kind in ("forward", "reverse")),
)


def test_every_case_of_every_framework_is_tested():
    cases = {f"{target.name}:{case.name}" for target in REPOSITORIES for case in target.cases}
    assert cases == {*OF_EACH_TOKEN, *OF_RESPONSES}
    assert all(target.repository.startswith("https://github.com/") for target in REPOSITORIES)


@pytest.mark.parametrize("target", OF_EACH_TOKEN)
def test_cases_are_called_as_their_framework_calls_them(checkout, inputs, by_hand, target):
    kind, weight = OF_EACH_TOKEN[target]
    u, k3 = by_hand.u, (by_hand.k3, by_hand.k3_slope)
    formulas = {"k1": (u, torch.ones_like(u)), "abs": (u.abs(), u.sign()), "k2": (u * u / 2, u), "k3": k3}
    value, slope = (formulas | {"low_var_kl": k3})[kind]
    if weight in ("attached", "behaviour"):
        ratio = by_hand.w if weight == "behaviour" else torch.ones_like(u)
        value, slope = ratio * value, ratio * (value + slope)
    if weight == "mask":
        value, slope = (torch.where(inputs.mask, x, 0.0) for x in (value, slope))
    found, gradient = of(target, inputs, source=checkout)
    close(found, value)
    if not target.startswith("prime-rl"):  # there p is the inference engine
        close(gradient, slope)


def test_losses_of_whole_responses(checkout, inputs, by_hand):
    value, gradient = of("prime-rl:ref_kl", inputs, source=checkout)
    weighted = torch.where(inputs.mask, by_hand.w * by_hand.u, 0.0)
    close(value, weighted.sum(-1))
    close(gradient, weighted)  # the log ratio is detached
    forward, reverse = by_hand.exact(0.0), by_hand.exact(1.0)
    for name, exact in (("Forward", forward), ("Reverse", reverse), ("Symmetric", forward + reverse)):
        close(of(f"torchtune:{name}KLLoss", inputs, "logits_p", checkout)[0], mean(exact, inputs.mask))
    for name, exact in (("forward", forward), ("reverse", reverse)):
        close(of(f"nemo-rl:distillation_{name}", inputs, "logp", checkout)[0], mean(exact, inputs.mask))


def test_the_command_records_the_commit(checkout, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--source", str(checkout), "--trust-source", "--json"]
    commit = commit_of(checkout, "slime/utils/ppo_utils.py")
    (named,) = audits_of(cases_of("slime:k3", source=checkout))
    assert named.versions["slime"] == commit and named.gradient == "KL(q ‖ p)"
    target = "slime/utils:compute_approx_kl"
    assert main(["audit", target, "--convention", "loss", "--set", "kl_loss_type=k3", *words]) == 0
    (typed,) = json.loads(capsys.readouterr().out)["audits"]
    assert typed["versions"]["slime/utils/ppo_utils.py"] == commit
    assert (typed["value"], typed["gradient"]) == ("KL(p ‖ q)", "KL(q ‖ p)")
    page = (tmp_path / "audit.html").read_text()
    assert f"kleash audit {target} --source {checkout} --convention loss" in page


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (None, 2, "this runs code of pack/asks.py:k1 in "),
        ("", 2, "nothing was run"),
        ("y\n", 0, "Run it? [y/N]"),
    ],
)
def test_foreign_code_runs_once_that_is_allowed(tmp_path, monkeypatch, answer, code, words):
    monkeypatch.chdir(tmp_path)
    module = "RAN = open('ran', 'w').close()\n\ndef k1(p, q, _=RAN):\n    return p - q\n"
    write_checkout(tmp_path / "source", {"pack/asks.py": module}, commit=False)
    said = io.StringIO() if answer is None else Terminal()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(sys, "stdin", io.StringIO() if answer is None else Terminal(answer))
    command = ["audit", "pack/asks.py:k1", "--source", "source", "--convention", "reward", "--quiet"]
    assert main(command) == code
    assert words in said.getvalue()
    assert (tmp_path / "ran").exists() is (code == 0)
