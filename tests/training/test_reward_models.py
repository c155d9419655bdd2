"""Reward models out of folders: the numbers that transformers itself gives, one text at a time."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scoring_cases import sequence_of
from tiny_models import CONFIGS, edit_json, metaspace_tokenizer, save_tiny, tiny_tokenizer
from transformers import AutoModelForSequenceClassification, BertConfig

from kleash.errors import CannotRunError, ModelError
from kleash.training import load_rewards
from kleash.training.reward_models import Dialogue, load_reward_model

TEXTS = (
    (" was calm and the boat went out", "The sea"),
    ("", "She counted"),
    (" road leads out of the town", "A long"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("models") / "judge")


def saved(folder: Path, labels: int = 1, chat: bool = True, **config: Any) -> Path:
    torch.manual_seed(7)
    network = AutoModelForSequenceClassification.from_config(CONFIGS["llama"](num_labels=labels, **config))
    network.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    template, tokenizer.chat_template = tokenizer.chat_template, tokenizer.chat_template if chat else None
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = template
    return folder


def saved_encoder(folder: Path) -> Path:
    """A model that looks at a text from both sides: padding that is not masked would change its scores."""
    torch.manual_seed(7)
    shape = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**shape, intermediate_size=48, pad_token_id=2, initializer_range=0.3, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def alone(folder: Path, text: str, *, special: bool = True) -> float:
    """The logit of a single text, unpadded, as transformers computes it."""
    network = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = tiny_tokenizer()(text, add_special_tokens=special, return_tensors="pt")["input_ids"]
    return network.eval()(input_ids=ids).logits.item()


def plain() -> list[Dialogue]:
    return [Dialogue(prompt=prompt, response=response) for response, prompt in TEXTS]


@pytest.mark.parametrize("make", [saved, saved_encoder, partial(saved, pad_token_id=None)])
def test_scores_do_not_depend_on_the_batch(
    make: Callable[[Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Padding is masked, and without a padding token texts are scored singly; tensors that are not used are told."""
    folder = make(tmp_path / "judge")
    weights = folder / "model.safetensors"
    save_file({**load_file(weights), "score.extra": torch.ones(1)}, weights, {"format": "pt"})
    expected = [alone(folder, prompt + response) for response, prompt in TEXTS]
    for batch_tokens in (1, 4096):
        scores = load_reward_model(str(folder), batch_tokens=batch_tokens)(plain())
        assert scores == pytest.approx(expected, rel=1e-4)
    assert "are not used by its architecture, such as score.extra" in caplog.text
    assert len({round(score, 3) for score in scores}) == 3, "or a wrong order would not be seen"


@pytest.mark.parametrize(
    ("chat", "text"), [(True, "<s>user: Sea?\nassistant: Calm.\n"), (False, "user: Sea?\nCalm.")]
)
def test_messages_use_the_reward_models_chat_template_or_are_joined(
    tmp_path: Path, chat: bool, text: str
) -> None:
    folder, messages = saved(tmp_path / "judge", chat=chat), ({"role": "user", "content": "Sea?"},)
    asked = Dialogue(prompt="user: Sea?\n", response="Calm.", messages=messages)
    expected = alone(folder, text, special=not chat)
    assert load_reward_model(str(folder))([asked]) == pytest.approx([expected], rel=1e-4)


def test_reward_model_adds_to_other_rewards(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    rewards = load_rewards([f"2*{folder}", "kleash.training.example_rewards:heroine"], tokenizer=tokenizer)
    ids = tokenizer(" she was", add_special_tokens=False)["input_ids"]
    answer = sequence_of((0,), [*ids, 1], prompt_text="The sea", response_text=" she was</s>")
    found = rewards.of([answer])
    assert list(found.parts) == ["judge", "heroine"]
    assert found.total.tolist() == pytest.approx([2 * alone(folder, "The sea she was") + 1], rel=1e-4)


def test_a_response_follows_its_prompt_with_the_space_that_its_tokenizer_drops(folder: Path) -> None:
    """In PPO and in TRL's trainers."""
    pytest.importorskip("trl")
    from kleash.training.with_trl.online import PROMPT_COLUMN, _reward_function

    tokenizer = metaspace_tokenizer()
    rewards = load_rewards([str(folder)], tokenizer=tokenizer)
    answer = sequence_of((0, 1), [2], prompt_text="The sea", response_text=tokenizer.decode([2]))
    prompt: Any = SimpleNamespace(text="The sea", token_ids=(0, 1), messages=None, columns={})
    in_trl = _reward_function(rewards.rewards[0], range(1), [prompt], ["prompt 1"], tokenizer)
    found = in_trl(completions=["was"], completion_ids=[[2]], **{PROMPT_COLUMN: [0]})
    assert answer.response_text == "was" and found == rewards.of([answer]).total.tolist()
    assert found == pytest.approx([alone(folder, "The sea was")], rel=1e-4)


def test_text_beyond_the_context_length_is_not_truncated_silently(folder: Path) -> None:
    long = Dialogue(prompt="The sea", response=" was calm" * 80, name="prompt 3, sample 1")
    said = r"reads 1 to 128 tokens and prompt 3, sample 1 has \d+; lower --max"
    with pytest.raises(CannotRunError, match=said):
        load_reward_model(str(folder))([long])


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (save_tiny, {}, r"lacks 1 of its weights, which would be random: score\.weight"),
        (partial(saved, labels=3), {}, "has 3 labels; a reward is one number"),
        (saved, {"model_type": "x", "auto_map": {"AutoConfig": "x.X"}}, "custom code .* no code of its own"),
    ],
)
def test_what_is_no_reward_model_is_refused(make: Any, changes: Any, said: str, tmp_path: Path) -> None:
    edit_json(make(tmp_path / "llama") / "config.json", **changes)
    with pytest.raises(ModelError, match=said):
        load_reward_model(str(tmp_path / "llama"))
