"""``kleash env``."""

import platform
import subprocess
import sys
from importlib.metadata import version

from kleash.cli import main
from kleash.version import __version__

BASE_ALONE = """
import importlib.util, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rich", "transformers", "pyarrow", "jinja2", "matplotlib"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
from kleash.cli import main
sys.exit(main(["env"]))
"""


def test_it_prints_versions_and_machine(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert main(["env"]) == 0
    output = capsys.readouterr().out
    lines = dict(line.split(": ", 1) for line in output.splitlines())
    assert lines["kleash"] == __version__ and lines["python"] == platform.python_version()
    assert (lines["torch"], lines["transformers"]) == (version("torch"), version("transformers"))
    assert lines["OMP_NUM_THREADS"] == "3" and "secret" not in output


def test_it_takes_no_more_than_the_base_install():
    process = subprocess.run([sys.executable, "-c", BASE_ALONE], capture_output=True, text=True, check=True)
    assert process.stdout.startswith(f"kleash: {__version__}\n")
