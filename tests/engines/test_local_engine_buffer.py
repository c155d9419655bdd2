"""The memory that a measurement gives to the logits of a chunk: fixed on a CPU, chosen by the device on a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scoring_cases import sequence_of
from tiny_models import tiny_pair

from kleash.engines import LocalEngine, Shard, local
from kleash.linear import LinearOptions
from kleash.models import load_pair, score
from kleash.records import MeasureJob

SEQUENCES = tuple(sequence_of((3, 5, 7 + n), range(10, 40 + n), prompt_id=n) for n in range(6))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    policy, reference = tiny_pair(tmp_path_factory.mktemp("pair"))
    return load_pair(str(policy), str(reference))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(("device", "wanted"), [("cuda", None), ("cpu", 96 * 2**20)])
def test_a_gpu_s_free_memory_decides_and_a_cpu_has_96_mib(monkeypatch, pair, device, wanted):
    """At 96 MiB a chunk has 80 tokens of 151 936 words, for each of which a GPU would read all weights."""
    seen = []

    def scored(there, *given, **named):
        seen.append(named["options"].buffer_bytes)
        return score(pair, *given, top=5)

    monkeypatch.setattr(local, "score", scored)
    there = replace(pair, policy=replace(pair.policy, device=torch.device(device)))
    LocalEngine(pair=there, job=MeasureJob()).run(Shard(index=0, sequences=SEQUENCES))
    assert seen == [wanted]


def test_on_a_cpu_the_numbers_do_not_depend_on_the_memory_for_a_chunk(pair):
    """Bit for bit, down to chunks of a few tokens."""
    pytest.importorskip("torch", "2.11", "products of older ones depend on the number of rows")
    engine = LocalEngine(pair=pair, job=MeasureJob()).run(Shard(index=0, sequences=SEQUENCES)).tokens
    for buffer_bytes in (None, 2**16):
        found = score(pair, SEQUENCES, options=LinearOptions(buffer_bytes=buffer_bytes))
        for name, numbers in found.items():
            assert np.array_equal(engine[name], numbers, equal_nan=True), name
    assert engine["kl_policy_reference"].min() > 0
