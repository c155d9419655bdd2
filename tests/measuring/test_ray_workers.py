"""Workers of Ray: what they answer, and differences between them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kleash.engines import Shard
from kleash.engines.base import EngineTraits
from kleash.errors import ClusterError
from kleash.measuring.progress import ProgressReporter
from kleash.measuring.ray_workers import LoadedModels, RayEngine, connected_cluster, start_actors
from kleash.records import MeasureJob
from kleash.store.job_folder import RunHeader

HEADER = RunHeader(kleash="1", settings={}, source_sha256="", fingerprints={"policy": "p"})


class StandInRay:
    """Runs a call when its result is asked for; ``wait`` gives the oldest."""

    exceptions = SimpleNamespace(RayTaskError=ZeroDivisionError, RayError=ZeroDivisionError)

    def wait(self, calls, num_returns, timeout=None):
        return calls[:1], calls[1:]

    def get(self, call):
        return call()


def actor(header):
    """A worker that loads nothing."""
    result = SimpleNamespace(sequences={"tokens": [2, 3]})
    loaded = LoadedModels(header, None, EngineTraits())

    def remote(answer):
        return SimpleNamespace(remote=lambda *_: lambda: answer)

    return SimpleNamespace(__ray_ready__=remote(True), describe=remote(loaded), run=remote((header, result)))


def engine_of(*headers):
    pair = None
    return RayEngine(
        ray=StandInRay(),
        actors=[actor(header) for header in headers],
        loaded=LoadedModels(headers[0], pair, EngineTraits()),
        pair=pair,
        reporter=ProgressReporter(),
    )


def test_every_shard_is_scored_once_and_few_are_read_ahead():
    read = []

    def shards():
        for index in range(9):
            read.append(index)
            yield Shard(index=index)

    scored = []
    for shard, _ in engine_of(HEADER, HEADER).results(shards()):
        scored.append(shard.index)
        assert len(read) - len(scored) < 4, "two workers with two shards each"
    assert sorted(scored) == list(range(9))


@pytest.mark.parametrize(
    "change", [{"fingerprints": {"policy": "q"}}, {"environment": {"the version of torch": "1"}}]
)
def test_a_worker_with_other_weights_or_versions_gets_no_shard(change):
    with pytest.raises(ClusterError, match="measure different things"):
        list(engine_of(HEADER, replace(HEADER, **change)).results(iter([Shard(index=0)])))


def test_a_worker_without_room_is_refused_and_memory_counts():
    job = MeasureJob(engine="ray", resources_per_worker="cpu=2,memory=1e9")
    assert job.reserved(has_gpus=True) == {"CPU": 2.0, "memory": 1e9}
    assert MeasureJob(engine="ray").reserved(has_gpus=True) == {"CPU": 1.0, "GPU": 1.0}
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "memory": 0.5e9}}]
    with pytest.raises(ClusterError, match=r"no node .* has CPU=2,memory=1e"):
        start_actors(SimpleNamespace(nodes=lambda: nodes), job, None, ())


@pytest.mark.peers("ray")
def test_an_address_at_which_nothing_answers_is_refused_at_once():
    with (
        pytest.raises(ClusterError, match=r"127\.0\.0\.1:9"),
        connected_cluster(MeasureJob(engine="ray", address="127.0.0.1:9")),
    ):
        pass
