"""Options of a training run that are beyond every machine are refused by a sentence, before anything is loaded."""

import pytest

from kleash.errors import OptionError
from kleash.records import DPOJob, GRPOJob, PPOJob


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_rank": 10**6}, "--lora-rank must be at most 65 536; it is 1000000"),
        ({"steps": 10**12}, "--steps must be at most"),
        ({"learning_rate": 1e300}, "--learning-rate must be at most 1 000; it is 1e+300"),
        ({"prompts_per_step": 10**8}, "--prompts-per-step 100000000, --samples-per-prompt"),
        ({"samples_per_prompt": 10**9}, "a step holds at most 1000000 responses"),
        ({"max_new_tokens": 10**12}, "--max-new-tokens 1000000000000 make a step of"),
        ({"temperature": 1e300}, "--temperature must be at most 10 000"),
        ({"temperature": 1e-300}, "--temperature must be at least 0.0001"),
        ({"epochs": 10**9}, "--epochs must be at most 10 000"),
        ({"beta": 1e308}, "--beta must be at most"),
        ({"horizon": 5}, "--horizon belongs to --controller ziegler, and the controller is fixed"),
        ({"horizon": 0, "controller": "ziegler", "target_nats": 1.0}, "--horizon must be at least 1"),
    ],
)
@pytest.mark.parametrize("kind", [PPOJob, GRPOJob])
def test_what_no_machine_can_do_is_refused(kind: type, options: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        kind(**options)
    assert said in str(caught.value) and len(str(caught.value)) < 300


def test_pairs_are_bounded_too() -> None:
    with pytest.raises(OptionError, match="--pairs-per-step must be at most"):
        DPOJob(pairs="x", pairs_per_step=10**9)
