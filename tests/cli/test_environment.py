"""``kleash env``."""

import platform
from importlib.metadata import version

from kleash.cli import main
from kleash.version import __version__


def test_it_prints_versions_and_machine(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)  # with a driver that is too old
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["env"]) == 0
    output = capsys.readouterr().out
    lines = dict(line.split(": ", 1) for line in output.splitlines())
    assert lines["kleash"] == __version__ and lines["python"] == platform.python_version()
    assert (lines["torch"], lines["transformers"]) == (version("torch"), version("transformers"))
    assert lines["OMP_NUM_THREADS"] == "3" and "secret" not in output and "GPUs: none that torch" in output
