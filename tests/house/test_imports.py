"""What each part of kleash may load: a command that only reads files must not wait for torch."""

import json
import subprocess
import sys

import pytest

import kleash

DENY = """
import sys

class Deny:
    def __init__(self, names): self.names = names
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in self.names:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)

def deny(*names): sys.meta_path.insert(0, Deny(set(names)))
"""
OPTIONAL = ["transformers", "tokenizers", "safetensors", "peft", "accelerate", "pyarrow", "jinja2", "tyro"]
OPTIONAL += ["matplotlib", "rich", "shtab", "filelock", "scipy", "triton"]


def run(code):
    return subprocess.run([sys.executable, "-c", DENY + code], capture_output=True, text=True, timeout=120)


FLOORS = ("divergences", "estimators", "linear", "losses", "leash", "uncertainty", "shipped")
MODULES = ("", *(f".{name}" for name in FLOORS), ".masking", ".records")
LAZY_JOBS = ("measure", "MeasureJob")
IMPORT_EACH = """
import importlib, json, os, tempfile, torch, traceback

def import_all(module):
    imported = importlib.import_module(f"kleash{module}")
    for name in getattr(imported, "__all__", ()):
        if name not in LAZY_JOBS:
            getattr(imported, name)

errors = {}
for module in MODULES:  # each in a fork, which has imported torch and nothing of kleash
    with tempfile.TemporaryFile("w+") as report:
        child = os.fork()
        if child == 0:
            try:
                import_all(module)
            except BaseException:
                report.write(traceback.format_exc())
                report.flush()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            report.seek(0)
            errors[module] = report.read() or "it died"
print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def import_errors():
    """What importing all public names of each module raises where only the base install is there."""
    optional = [name for name in OPTIONAL if name != "filelock"]  # torch itself needs filelock
    done = run(f"deny(*{optional!r})\nMODULES, LAZY_JOBS = {MODULES!r}, {LAZY_JOBS!r}{IMPORT_EACH}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", MODULES)
def test_the_lower_floors_need_only_the_base_install(module, import_errors):
    assert module not in import_errors, import_errors[module]


READERS = (".uncertainty", ".records", ".reports", ".shipped", ".cli", ".measuring", ".pytest_plugin")


@pytest.mark.parametrize("module", READERS)
def test_what_only_reads_files_imports_neither_torch_nor_matplotlib(module):
    denied = ["torch", "matplotlib", *(["numpy"] if module == ".shipped" else [])]
    done = run(f"deny(*{denied})\nimport kleash{module}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "said"), [("measure", "this measures"), ("train ppo", "the policy is the small model")]
)
def test_the_first_words_of_a_command_are_printed_before_torch_is_imported(words, said):
    done = run(f"deny('torch')\nfrom kleash.cli import main\nmain({words.split()!r})")
    assert said in done.stderr and "No module named 'torch'" in done.stderr


def test_help_never_imports_torch():
    names = ("", "measure", "report", "compare", "cache", "audit")
    lines = ["--version", *(f"{name} --help" for name in names)]
    code = f"from kleash.cli import main\nfor line in {lines!r}:\n    assert main(line.split()) == 0"
    done = run(f"deny('torch', 'transformers', 'ray', 'matplotlib')\n{code}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: kleash") == len(lines) - 1


def test_reading_the_command_line_needs_no_more_than_the_base_install():
    done = run(
        "deny('rich', 'torch', 'transformers', 'jinja2', 'matplotlib', 'pyarrow')\n"
        "from kleash.cli import main\n"
        "assert main(['train', 'ppo', '--help']) == 0\n"
        "for line in ('measure --polcy x', 'train ppo --kl k3 --kl-place reward', 'measure --quiet', 'compare a b'):\n"
        "    assert main(line.split()) == 2\n"
        "sys.meta_path[0].names.remove('torch')\n"
        "assert main(['env']) == 0\n"
    )
    assert done.returncode == 0, done.stderr
    assert f"\nkleash: {kleash.__version__}\n" in done.stdout
    typo, reward, models, pages = (line.removeprefix("kleash: ") for line in done.stderr.splitlines())
    assert "did you mean --policy?" in typo and "k3 as a reward does not have the gradient" in reward
    command = "are not installed; run: pip install 'kleash[models]'"
    assert models == f"rich, transformers, pyarrow, jinja2 and matplotlib {command}"
    assert pages == f"rich, pyarrow, jinja2 and matplotlib {command}"
