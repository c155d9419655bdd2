"""GRPO of a vision-language model whose prompts have one text and different images."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from tiny_models import tiny_tokenizer
from tiny_towers import save_tower
from transformers import CLIPImageProcessor, LlavaProcessor
from trl_batches import TRL_MARKS, config, moved, texts

import kleash
from kleash.diagnosis import read_rollouts
from kleash.records import read_samples, read_steps

pytestmark = TRL_MARKS
TEMPLATE = "{% for part in messages[0]['content'] %}{{ part['text'] or '<image>' }}{% endfor %}"


@pytest.fixture
def vision(tmp_path):
    """A folder with a LLaVA that reads an image of 28 x 28 pixels as four tokens."""
    tokenizer = deepcopy(tiny_tokenizer())  # which is shared by all tests
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    token, sizes = tokenizer.convert_tokens_to_ids("<image>"), {"image_size": 28, "patch_size": 14}
    folder = save_tower(tmp_path / "vision", "llava", image_token_index=token, vision_config=sizes)
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    strategy = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    strategy |= {"patch_size": 14, "chat_template": TEMPLATE}
    LlavaProcessor(images, tokenizer, **strategy).save_pretrained(folder)
    return folder


def test_images_are_in_kl_rollouts_and_the_names_of_prompts(trl, vision, tmp_path):
    from datasets import Dataset
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 255, (2, 28, 28, 3), dtype=np.uint8)
    rows = [
        {"prompt": [{"role": "user", "content": "sea"}], "image": Image.fromarray(each)} for each in pixels
    ]
    trainer = trl.LeashedGRPOTrainer(
        str(vision),
        reward_funcs=lambda completions, **_: [len(text[0]["content"]) / 10 for text in completions],
        args=config(trl.GRPOConfig, tmp_path / "trl"),
        train_dataset=Dataset.from_list(rows),
    )
    moved(trainer.model, 0.2)
    networks = [deepcopy(each).eval().double() for each in (trainer.model, trainer.ref_model)]
    generate, batches = trainer._generate_and_score_completions, []
    trainer._generate_and_score_completions = lambda inputs: batches.append(generate(inputs)) or batches[-1]
    kleash.attach(trainer, out=tmp_path / "run", rollouts_every=1)
    trainer.train()
    (ids, mask), batch, logps = texts(batches[0]), batches[0], []
    for network in networks:
        vars(network).pop("forward", None)  # TRL's, which is bound to the network that was copied
        with torch.no_grad():
            logits = network(ids, batch["pixel_values"].double(), mask).logits
        logps.append(logits[:, batch["prompt_ids"].size(1) - 1 : -1].log_softmax(-1))
    keep = batch["completion_mask"].bool()
    kl = torch.where(keep, (logps[0].exp() * (logps[0] - logps[1])).sum(-1), 0.0)
    first = read_steps(tmp_path / "run")[0].metrics
    assert first["kl/exact_per_token"] == pytest.approx((kl.sum() / keep.sum()).item(), rel=1e-4)
    error = kl.sum(-1).reshape(2, 2).mean(1).diff().abs().item() / 2  # of two prompts
    assert first["kl/exact_per_sequence_error"] == pytest.approx(error, rel=1e-3)
    assert trainer.state.log_history[0]["kl/per_sequence_error"] == pytest.approx(error, rel=1e-3)
    drawn = logps[0].gather(-1, batch["completion_ids"].unsqueeze(-1))[..., 0]
    rollouts = read_rollouts(tmp_path / "run" / "rollouts" / "step-000000-rank-0.jsonl")
    for rollout, logp, is_counted in zip(rollouts, drawn, keep, strict=True):
        np.testing.assert_allclose(rollout.trainer, logp[is_counted].numpy(), atol=1e-4)
    names = [sample.sample.prompt for sample in read_samples(tmp_path / "run")]
    assert len({*names}) == 2 and all(name.endswith("]sea") for name in names), "the same in both steps"
