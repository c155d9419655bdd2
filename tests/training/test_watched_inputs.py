"""What a training reads is what its header has the hash of."""

from pathlib import Path

import pytest

from kleash.errors import ChangedInputError
from kleash.records import PPOJob
from kleash.training.runner import run_job


@pytest.mark.parametrize("text", ["Once\nIt was\n", "Once more\n"])
def test_prompts_that_change_while_models_load_are_refused(tmp_path: Path, text: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once\n")

    def trainer(job, run_log):
        prompts.write_text(text)
        run_log.begin(0)

    with pytest.raises(ChangedInputError, match="was written to"):
        run_job(PPOJob(prompts=str(prompts), out=str(tmp_path / "run")), trainer)
