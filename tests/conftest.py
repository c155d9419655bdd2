"""What all tests share: a quiet, offline, repeatable machine, and the tools that some tests need."""

import atexit
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxtyping
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from command_forks import CommandForks

FORKS: pytest.StashKey["CommandForks"] = pytest.StashKey()

CHROMIUM_FLAGS = (
    "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync"
)

ROOT = Path(__file__).resolve().parent.parent

# until all is imported, which makes many objects and no garbage
gc.disable()
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # whose exit code says nothing: to free what was imported takes seconds
else:
    atexit.register(gc.unfreeze)

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# Without a cache of bytecode, each process would compile kleash and each pytest all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Processes of one thread use two cores better than threads; before torch is imported, here and in other processes.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
CPU = Path("/proc/cpuinfo")
if not (CPU.exists() and "amx" in CPU.read_text()):
    # Inductor would build and load a program for each instruction set. Compilers know all of them but the newest AMX.
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
# Ray's 15 leaves a worker a hundredth of a processor beside the other tests.
os.environ.setdefault("RAY_worker_niceness", "0")


def leave_in_memory(descriptor: int) -> None:
    """In the place of ``os.fsync``: no test cuts the power, and a measurement waits for the disk for .3 s in all."""
    os.fstat(descriptor)


os.fsync = leave_in_memory

# The first example of a test pays for what torch loads lazily, which hypothesis' deadline calls flaky.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("ci")


def skip_or_fail(variable: str, what: str) -> None:
    """Skip, or fail where the environment promises that ``what`` is there."""
    if os.environ.get(variable) == "1":
        pytest.fail(f"{variable}=1 promises {what}, and there is none")
    pytest.skip(f"needs {what}")


SLOWEST_FILES = (
    *("test_detection_rate.py", "test_sharded_models.py", "test_zero3.py", "test_wheel.py"),
    *("test_verl_penalty.py", "test_text_towers.py", "test_gguf_models.py"),
    *("test_adapter_rules.py", "test_docs.py", "test_single_faults.py", "test_trl_runs.py"),
    *("test_ppo_processes.py", "test_ppo_resume.py", "test_ray_run.py", "test_doctor_issue.py"),
    *("test_untrusted_checkpoints.py", "test_model_generation.py", "test_in_ray.py"),
    *("test_target_verdicts.py", "test_shared_runs.py", "test_linear_parallel.py"),
    *("test_trl_short_runs.py", "test_second_device.py", "test_audit_command.py"),
)
"""Files of more than about 15 s, which several workers begin with: at the end, all but one would wait for them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first."""
    ranks = {name: rank for rank, name in enumerate(SLOWEST_FILES)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


def pytest_collection_finish() -> None:
    """Let the collector leave alone what was imported."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Before the first test: make the process whose forks run programs, while this one has no threads."""
    if any("command_forks" in getattr(item, "fixturenames", ()) for item in session.items):
        from command_forks import CommandForks

        session.config.stash[FORKS] = CommandForks()


MEASURE_WITHOUT_CHARTS = {
    *("auditing", "cli", "diagnosis", "engines", "examples", "house"),
    *("integrations", "jobs", "measuring", "models", "sources", "training"),
}
"""Folders of tests that write pages and look at no chart; those of ``reports`` do."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: leave out charts that no test looks at, and tests of packages that are not there."""
    is_left_out = item.path.relative_to(ROOT / "tests").parts[0] in MEASURE_WITHOUT_CHARTS
    if is_left_out or "undrawn_charts" in sys.modules:
        from undrawn_charts import draw_charts

        draw_charts(not is_left_out)
    asked = [package for mark in item.iter_markers("peers") for package in mark.args]
    missing = [package for package in asked if find_spec(package) is None]
    if missing:
        skip_or_fail("KLEASH_REQUIRE_PEERS", " and ".join(missing))


def path_with(folder: str, package: str) -> str:
    """PYTHONPATH with a folder of packages in the virtual environment; skip where it does not have ``package``."""
    path = Path(sys.prefix) / folder
    if not (path / package).is_dir():
        skip_or_fail("KLEASH_REQUIRE_PEERS", f"{package} in .venv/{folder}")
    return os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    from tiny_models import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def compiler() -> str:
    """A C++ compiler for torch.compile."""
    found = shutil.which("g++") or shutil.which("clang++")
    return found or skip_or_fail("KLEASH_REQUIRE_COMPILER", "a C++ compiler")


@pytest.fixture(scope="session")
def chromium() -> tuple[str, str]:
    """Headless Chromium and its driver."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    return skip_or_fail("KLEASH_REQUIRE_BROWSER", "chromium and chromedriver")


@pytest.fixture(scope="session")
def deepspeed_path() -> str:
    """PYTHONPATH with DeepSpeed, which transformers and accelerate would import in every test if they found it."""
    return path_with("isolated", "deepspeed")


@pytest.fixture(scope="session")
def formats_path() -> str:
    """PYTHONPATH with the packages of quantised formats, some of which transformers would import in every test."""
    return path_with("formats", "compressed_tensors")


@pytest.fixture(scope="session")
def driver(chromium: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium without a network."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium[0]
    for flag in CHROMIUM_FLAGS.split():
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.set_capability("unhandledPromptBehavior", "ignore")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=chromium[1]))
    try:
        browser.execute_cdp_cmd("Network.enable", {})
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        yield browser
    finally:
        browser.quit()


@pytest.fixture(scope="session")
def command_forks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["CommandForks"]:
    """Runs ``kleash`` and other programs as processes of their own, without the time of their imports."""
    with request.config.stash[FORKS] as forks:
        forks.folder = tmp_path_factory.mktemp("streams")
        yield forks


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return ROOT


@pytest.fixture
def unhooked() -> Iterator[None]:
    """The package's own errors, also in a run that checks the shapes of every call first."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
