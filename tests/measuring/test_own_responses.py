"""``--show-reference``: the reference's own responses are those that it draws when it is the policy."""

from dataclasses import replace
from pathlib import Path

import pytest

import kleash
from kleash.errors import OptionError, RunFolderError
from kleash.jobs import MeasureJob
from kleash.store import RunFolder

PROMPTS = [f"She said that {thing}" for thing in ("it was late", "the sea", "he would come")]


def responses(folder: Path) -> dict[int, str]:
    """Prompt -> the first response of a run's policy."""
    found: dict[int, str] = {}
    for part in RunFolder(folder).parts("sequences", ["prompt_id", "response"]):
        for prompt, response in zip(*part.values(), strict=True):
            found.setdefault(int(prompt), response)
    return found


def test_both_models_answer_the_prompts_with_the_largest_kl(tmp_path: Path) -> None:
    options = {"prompts": PROMPTS, "max_new_tokens": 8, "samples_per_prompt": 2, "seed": 3}
    shown = kleash.measure(**options, show_reference=True, out=tmp_path / "shown")
    plain = kleash.measure(**options, out=tmp_path / "plain")
    kleash.measure(**options, policy="shipped:reference", out=tmp_path / "reference")
    own, drawn = responses(tmp_path / "shown"), responses(tmp_path / "reference")
    assert len(shown.prompts) == 3 and own != drawn
    for prompt in shown.prompts:
        assert prompt.policy_response == own[prompt.prompt_id]
        assert prompt.reference_response == drawn[prompt.prompt_id]
    assert shown.per_token == plain.per_token and plain.prompts[0].reference_response is None
    assert (tmp_path / "shown" / "report.html").read_text().count("<summary>Responses</summary>") == 3
    assert kleash.open(tmp_path / "shown").prompts == kleash.open(shown).prompts == shown.prompts
    with pytest.raises(RunFolderError, match="not read from a run folder"):
        kleash.open(replace(shown, folder=None))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"text": "t"}, "--text asks for none"),
        ({"prompts": "p", "engine": "ray"}, "it is in the workers"),
        ({"prompts": "p", "device_map": "tensor"}, "divides it over processes"),
        ({"prompts": "p", "reference_cache": "cache/"}, "--reference-cache stands for it"),
    ],
)
def test_a_reference_that_cannot_answer_is_refused(options: dict[str, str], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        MeasureJob(policy="p", show_reference=True, **options)
