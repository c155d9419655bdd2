"""What is installed is the package, and each extra alone brings what its commands need."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata

import pytest
from packaging.requirements import Requirement

SMALL = '"--limit", "2", "--max-new-tokens", "4", "--quiet", "--out", "run"'
STEP = f'"--steps", "1", "--prompts-per-step", "2", {SMALL}'
IMPORTS = "import gc\nfrom pathlib import Path\nimport kleash, torch\nfrom kleash.cli import main"
BASE = """
assert kleash.kl(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()) > 0.14
assert main(["env"]) == main(["--help"]) == main(["audit", "kleash:sampled_k3", "--quiet"]) == 0
"""
CLI = """
Path("audit.yaml").write_text("target: kleash:sampled_k3")
assert main(["--completion", "bash"]) == main(["audit", "--config", "audit.yaml"]) == 0
"""
PPO = f"""
assert main(["train", "ppo", "--minibatches", "1", "--report-to", "tensorboard", {STEP}]) == 0
assert list(Path("run/tensorboard").iterdir())
"""
DATASETS = """
from datasets import Dataset
Dataset.from_dict({"prompt": ["The sea"]}).save_to_disk("prompts")
assert len(kleash.measure(prompts="prompts", max_new_tokens=4, out="run").to_pandas())
"""
WORK = {
    "": BASE,
    "cli": CLI,
    "models": f'assert main(["measure", {SMALL}]) == 0',
    "train": PPO,
    "datasets": DATASETS,
    "trl": f'assert main(["train", "grpo", "--samples-per-prompt", "2", {STEP}]) == 0',
    "ray": f'assert main(["measure", "--engine", "ray", "--workers", "1", {SMALL}]) == 0',
}
"""Extra -> what runs in an environment with that extra and nothing else."""


@pytest.fixture(scope="module")
def installed(root, tmp_path_factory):
    """The distribution of the wheel that is built from the source distribution."""
    out = tmp_path_factory.mktemp("wheel")
    words = ["-m", "build", "--no-isolation", "--outdir", str(out), str(root)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    zipfile.ZipFile(next(out.glob("*.whl"))).extractall(out / "site")
    return metadata.Distribution.at(next((out / "site").glob("*.dist-info")))


def test_everything_is_in_the_wheel_and_nothing_else(installed, root):
    def files(folder):
        paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {str(path) for path in paths if "__pycache__" not in path.parts}

    names = {name for name in files(installed.locate_file("")) if ".dist-info/" not in name}
    assert names == files(root / "src")
    assert "kleash/py.typed" in names
    assert any(path.match("licenses/LICENSE") for path in installed.files)


def test_project_urls_are_absolute(installed):
    """PyPI refuses a package whose metadata have another kind of address."""
    values = [installed.metadata.get("Home-page", ""), *installed.metadata.get_all("Project-URL", [])]
    addresses = [value.rpartition(",")[2].strip() for value in values if value]
    assert addresses
    assert all(re.fullmatch(r"https?://[^/\s]+\.[^/\s]+(/\S*)?", address) for address in addresses), addresses


def required(installed, extra):
    """The distributions that the wheel needs with an extra, by name, itself included."""
    found, wanted = {}, [("kleash", extra)]
    while wanted:
        name, extra = wanted.pop()
        if (name, extra) not in found:
            found[name, extra] = installed if name == "kleash" else metadata.distribution(name)
            for requirement in map(Requirement, found[name, extra].requires or ()):
                if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                    wanted += [(requirement.name, more) for more in ("", *requirement.extras)]
    return {name: distribution for (name, _), distribution in found.items()}


def make_environment(folder, distributions):
    """The Python of a new environment, in which packages are links to those of ``distributions``."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    owners = {file.parts[0]: distribution for distribution in distributions for file in distribution.files}
    for name in owners.keys() - {"..", "__pycache__"}:
        (site / name).symlink_to(owners[name].locate_file(name))
    return folder / "bin" / "python"


def test_every_extra_is_tested(installed):
    assert {"", *installed.metadata.get_all("Provides-Extra")} == {*WORK, "all"}
    assert required(installed, "all").keys() == required(installed, "train").keys()


PEERS = [pytest.param(name, marks=pytest.mark.peers(name)) for name in ("datasets", "trl", "ray")]


@pytest.mark.parametrize("extra", ["", "cli", "models", "train", *PEERS])
def test_each_extra_works_alone(extra, installed, tmp_path):
    python = make_environment(tmp_path / "environment", required(installed, extra).values())
    code = f"{IMPORTS}\n{WORK[extra]}\ngc.freeze()"  # to tear down what was imported takes a second
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [python, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
