"""A slice of benchmarks/damage.py: random damage is noticed, or changes nothing; nothing ends in a traceback."""

from collections import Counter

import pytest

DAMAGES = 16


@pytest.fixture(scope="module")
def tool(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "benchmarks")
        import damage

        yield damage


@pytest.fixture(scope="module")
def folders(tool, tmp_path_factory):
    return tool.make_folders(tmp_path_factory.mktemp("subjects"))


@pytest.mark.parametrize("kind", ["run", "cache", "training"])
def test_every_random_damage_is_reported_without_a_traceback(tool, folders, kind):
    outcomes = Counter()
    for name, victim, outcome, words in tool.damages(folders[kind], DAMAGES, seed=1):
        assert outcome not in ("silent", "traceback"), f"{name} of {victim}: {outcome}\n{words}"
        outcomes[outcome] += 1
    assert outcomes["refused"] >= DAMAGES / 4, outcomes
