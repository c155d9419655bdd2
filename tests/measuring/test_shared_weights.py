"""Options that spread models over several processes, where there are none."""

import pytest

from kleash.errors import CannotRunError, OptionError
from kleash.measuring import MeasureJob, measure
from kleash.models import load_pair


@pytest.mark.parametrize("device_map", ["fsdp", "tensor"])
def test_one_process_is_refused(device_map, tmp_path):
    job = MeasureJob(limit=2, device_map=device_map, out=str(tmp_path / "run"))
    with pytest.raises(
        OptionError, match=f"--device-map {device_map} spreads a model over several processes"
    ):
        measure(job)
    assert not (tmp_path / "run").exists()
    with pytest.raises(CannotRunError, match=f"--device-map {device_map}.*this is one process"):
        load_pair("shipped:policy", "shipped:reference", device_map=device_map)
