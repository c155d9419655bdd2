"""Jobs on a device that is not the CPU, where operations on tensors of both raise: the numbers are those of the CPU."""

import json
import subprocess
import sys

import pytest
import second_device

pytestmark = [pytest.mark.peers("trl", "accelerate", "peft"), pytest.mark.compiler]
OF_TIME = ("time/", "seconds", "_per_second", "_runtime", "step_time")
"""Parts of the names of metrics that are times."""


@pytest.fixture(scope="module")
def logged(tmp_path_factory, compiler, command_forks):
    """The numbers of each job on the CPU, and on the second device."""
    folder = tmp_path_factory.mktemp("devices")
    words = [second_device.__file__, str(folder / "cpu")]
    on_cpu = command_forks.start_python(words)
    library = second_device.build(compiler, folder)
    # no fork: one device too many for a parent that has once computed a gradient
    on_second = [sys.executable, second_device.__file__, str(folder / "second"), str(library)]
    done = subprocess.run(on_second, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert on_cpu.completed(words).returncode == 0
    return [json.loads((folder / device / "numbers.json").read_text()) for device in ("cpu", "second")]


@pytest.mark.parametrize("job", second_device.JOBS)
def test_numbers_are_those_of_the_cpu(logged, job):
    for on_cpu, on_second in zip(*(each[job] for each in logged), strict=True):
        assert compared(on_second) == pytest.approx(compared(on_cpu), rel=1e-2, abs=1e-6, nan_ok=True)


def compared(metrics):
    """Those that are numbers, and no times."""
    return {
        name: value
        for name, value in metrics.items()
        if not isinstance(value, str) and not any(part in name for part in OF_TIME)
    }
