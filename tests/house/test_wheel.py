"""What is installed is the package: types, models, pages and all, and it works from another folder."""

import email
import re
import subprocess
import sys
import zipfile

import pytest


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    words = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(root)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(out.glob("*.whl"))


def test_everything_is_in_the_wheel_and_nothing_else(wheel, root):
    names = set(zipfile.ZipFile(wheel).namelist())
    source = root / "src"
    wanted = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert wanted <= names, sorted(wanted - names)[:5]
    strangers = {name for name in names - wanted if ".dist-info/" not in name}
    assert not strangers, sorted(strangers)[:5]
    assert "kleash/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_project_urls_are_absolute(wheel):
    """PyPI refuses a package whose metadata have another kind of address."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Name"] == "kleash"
    values = [metadata["Home-page"] or "", *metadata.get_all("Project-URL", [])]
    addresses = [value.rpartition(",")[2].strip() for value in values if value]
    assert all(re.fullmatch(r"https?://[^/\s]+\.[^/\s]+(/\S*)?", address) for address in addresses), addresses


def test_the_installed_wheel_works_from_another_folder(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import torch, kleash\n"
        f"assert kleash.__file__.startswith({str(site)!r}), kleash.__file__\n"
        "p, q = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.5, 0.5]).log()\n"
        "print(round(float(kleash.kl(p, q)), 4))\n"
        "from kleash.shipped import shipped_folder, shipped_prompts\n"
        "assert (shipped_folder('policy') / 'model.safetensors').exists() and shipped_prompts().exists()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0.0823"
