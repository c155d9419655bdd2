"""The script that made the pair: reading the novels, cutting them up, training."""

import json
import re
import struct
import zlib
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from shipped_training import austen, figures, language_model, on_a_leash, passages
from transformers import LlamaConfig, LlamaForCausalLM

NOVEL = """A NOVEL

by Somebody

CHAPTER I

It was _very_ warm; the
whole  party was silent.

* * *

VOLUME II

Chapter 2.

"Yes."

FINIS

A NOTE ON THE TEXT

Spelling has been changed.
"""


def in_r(strings: list[str], kind: int = 16) -> bytes:
    """A character vector as R writes it: XDR, version 3, native encoding UTF-8."""
    head = b"X\n" + struct.pack(">iiii", 3, 0x40200, 0x30500, 5) + b"UTF-8"
    body = b"".join(struct.pack(">Ii", 0x40009, len(text.encode())) + text.encode() for text in strings)
    return head + struct.pack(">Ii", kind, len(strings)) + body


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_a_lazy_load_database_is_read_back():
    written = {name: [name.upper(), "", f"£{number} a year"] for number, name in enumerate(austen.NOVELS)}
    blocks = (in_r(strings) for strings in written.values())
    database = b"".join(struct.pack(">I", len(block)) + zlib.compress(block) for block in blocks)
    assert austen.novels(database) == written


@pytest.mark.parametrize(
    ("serialised", "message"), [(b"RDX3" + bytes(40), "begins with"), (in_r(["a"], kind=19), "type 19")]
)
def test_what_is_not_a_character_vector_is_refused(serialised, message):
    with pytest.raises(ValueError, match=message):
        austen.character_vector(serialised)


def test_chapters_hold_prose_and_nothing_else():
    lines = NOVEL.splitlines()
    assert austen.chapters(lines) == [["It was very warm; the whole party was silent."], ['"Yes."']]


def test_every_twelfth_chapter_is_held_out_of_training():
    chapters = [[f"chapter {number}"] for number in range(30)]
    kept, held = austen.split(chapters)
    assert held == [chapters[5], chapters[17], chapters[29]]
    assert sorted(kept + held) == sorted(chapters) and len(kept) == 27


def test_documents_lose_nothing_and_are_long_enough():
    paragraphs = [f"{number} " + "x" * (7 * number % 50) for number in range(60)]
    cuts = [list(austen.documents(paragraphs, Random(seed), 40, 90)) for seed in range(10)]
    for cut in cuts:
        assert "\n".join(cut).split("\n") == paragraphs
        assert all(len(text.replace("\n", "")) >= 40 for text in cut[:-1])
    assert cuts[0] != cuts[1]


def test_an_opening_ends_at_a_stop_and_not_after_mr():
    paragraph = "One two three four five six seven eight Mr. Ten eleven twelve, thirteen" + " more" * 40
    assert all(passages.opening(paragraph, Random(seed)).endswith("twelve,") for seed in range(20))
    assert len(passages.opening("word " * 60, Random(0)).split()) == 16


def test_prompts_are_openings_of_paragraphs_of_every_novel():
    long = {novel: [f"{novel} {number} " + "word, " * 60 for number in range(20)] for novel in ("one", "two")}
    held = {novel: [long[novel], ["Nine words of it, said he, and he left."] * 20] for novel in long}
    prompts = passages.prompts(held, "seed", 16)
    assert len(prompts) == len(set(prompts)) == 32
    assert sum(bool(re.match(r"one \d+ word,", prompt)) for prompt in prompts) == 16


def test_training_answers_other_prompts_than_those_that_ship():
    novel = {"one": [[f"{number} " + "word, " * 60 for number in range(90)]]}
    shipped, trained_on = passages.prompts(novel, "1", 16), passages.prompts(novel, "1/policy", 64)
    assert len(set(trained_on)) == 64 and shipped != trained_on[:16]


def test_the_policy_is_trained_by_ppo_on_the_shipped_reward_and_the_card_is_told(tmp_path, monkeypatch):
    asked = []

    def train(job, display):
        asked.append(job)
        metrics = {"reward/score": 5.0, "kl/exact_per_sequence": 12.5, "beta": 0.3, "time/step": 2.0}
        return SimpleNamespace(policy=str(tmp_path / "run" / "ppo" / "policy"), metrics=metrics)

    monkeypatch.setattr(on_a_leash, "train", train)
    for _ in range(2):
        folder, told = on_a_leash.train_policy(
            tmp_path / "reference", ["Once", "“Twice”"], tmp_path / "run", 7
        )
        (tmp_path / "run" / "ppo").mkdir(exist_ok=True)
    first, again = asked
    assert not first.resume and again.resume and folder == tmp_path / "run" / "ppo" / "policy"
    assert first.reference_name == first.policy == str(tmp_path / "reference")
    assert first.target_nats == 12.0 and first.controller == "pid" and first.kl == "exact" and first.seed == 7
    lines = Path(first.source).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["Once", "“Twice”"]
    assert told["prompts"] == 2 and told["last"] == {
        "reward/score": 5.0,
        "kl/exact_per_sequence": 12.5,
        "beta": 0.3,
    }
    assert told["learning_rate"] == first.learning_rate and told["lora_rank"] == first.lora_rank


def test_the_reward_of_responses_is_the_mean_of_their_words():
    tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: {1: "She, herself.", 2: "Her!"}[ids[0]]
    )
    assert figures.mean_reward(tokenizer, [([0], [1]), ([0], [2])]) == 1.5


def test_texts_stop_before_they_are_too_large():
    held = {"one": [[f"{number} " + "x" * 998 for number in range(300)]]}
    texts = passages.texts(held, "seed", 200, 300)
    assert 130_000 < sum(map(len, texts)) <= passages.TEXT_BYTES
    assert texts == sorted(texts, key=lambda text: int(text.split()[0]))


def test_the_rate_warms_up_and_falls_to_nothing():
    schedule = language_model.Schedule(steps=110, warmup=10, peak=2.0)
    rates = [schedule.rate(step) for step in range(110)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == pytest.approx(2.0) == pytest.approx(rates[10])
    assert rates[60] == pytest.approx(1.0)
    assert 0 < rates[-1] < 0.01


def test_batches_keep_to_their_budget_and_use_every_document_once():
    documents = [[number] * (1 + number % 37) for number in range(200)]
    groups = list(language_model.batches(documents, 128, Random(1)))
    assert sorted(ids for group in groups for ids in group) == sorted(documents)
    assert all(len(group) * max(map(len, group)) <= 128 for group in groups)


def test_losses_are_those_of_transformers_one_document_at_a_time(tiny):
    documents = [[0, 5, 7, 9, 1], [0, 3, 1], [0, 8, 8, 2, 30, 4, 1]]
    together = language_model.token_losses(tiny, documents)
    apart = [tiny(torch.tensor([ids]), labels=torch.tensor([ids])).loss for ids in documents]
    assert together.shape == (4 + 2 + 6,)
    torch.testing.assert_close(together[:4].mean(), apart[0])
    torch.testing.assert_close(together[4:6].mean(), apart[1])
    torch.testing.assert_close(together[6:].mean(), apart[2])
    mean, count = language_model.mean_loss(tiny, documents)
    assert count == 12
    assert mean == pytest.approx(together.mean().item(), rel=1e-5)


def test_training_learns_a_small_text_by_heart(tiny):
    documents = [[0, 5, 7, 9, 11, 13, 1], [0, 6, 8, 10, 12, 14, 1]]
    before, _ = language_model.mean_loss(tiny, documents)
    schedule = language_model.Schedule(steps=60, warmup=5, peak=2e-2, batch_tokens=7)
    reports: list[str] = []
    language_model.train(tiny, lambda _: documents, schedule, "seed", reports.append)
    after, _ = language_model.mean_loss(tiny, documents)
    assert before > 3 and after < 0.5
    assert len(reports) == 1 and reports[0].startswith("step    50  epoch 24")
    assert all(weight.grad is None for weight in tiny.parameters())


def test_the_tokenizer_learns_from_its_texts_and_ends_documents():
    tokenizer = language_model.learn_tokenizer(["the cat sat on the mat " * 50, "the dog " * 50])
    ids = language_model.encode(tokenizer, ["the cat", "the dog " * 600])
    assert ids[0][0] == tokenizer.bos_token_id and ids[0][-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[0][1:-1]) == "the cat" and len(ids[0]) == 4
    assert len(ids[1]) == language_model.CONTEXT
