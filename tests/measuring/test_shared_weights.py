"""Options that spread models over several processes, where there are none."""

from dataclasses import replace

import pytest

from kleash.errors import CannotRunError, OptionError
from kleash.measuring import MeasureJob, measure, measure_part
from kleash.measuring.rank_group import RankGroup
from kleash.measuring.shared_weights import process_group
from kleash.models import load_pair


@pytest.mark.parametrize("device_map", ["fsdp", "tensor"])
def test_one_process_is_refused(device_map, tmp_path):
    job = MeasureJob(limit=2, device_map=device_map, out=str(tmp_path / "run"))
    with pytest.raises(
        OptionError, match=f"--device-map {device_map} spreads a model over several processes"
    ):
        measure(job)
    with pytest.raises(OptionError, match="several processes"):
        measure_part(replace(job, shard="1/2"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(CannotRunError, match=f"--device-map {device_map}.*this is one process"):
        load_pair("shipped:policy", "shipped:reference", device_map=device_map)


def test_parts_of_a_run_are_refused():
    job = MeasureJob(limit=2, device_map="fsdp", shard="1/2", out="run")
    with (
        pytest.raises(OptionError, match="cannot be given with --shard 1/2"),
        process_group(job, RankGroup(0, 2)),
    ):
        pass
