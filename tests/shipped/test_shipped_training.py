"""The script that made the pair: reading the novels, cutting them up, training."""

import re
import struct
import zlib
from random import Random

import pytest
import torch
from shipped_training import austen, held_out, language_model
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


def test_speech_is_runs_of_paragraphs_that_begin_with_a_quotation_mark():
    chapter = ['"One."', '"Two," he said.', "Nobody spoke.", 'Then "three".', '"Four."']
    assert austen.speech(chapter) == [['"One."', '"Two," he said.'], ['"Four."']]
    assert austen.speech(["Silence."]) == []


def test_documents_lose_nothing_and_are_long_enough():
    paragraphs = [f"{number} " + "x" * (7 * number % 50) for number in range(60)]
    cuts = [list(austen.documents(paragraphs, Random(seed), 40, 90)) for seed in range(10)]
    for cut in cuts:
        assert "\n".join(cut).split("\n") == paragraphs
        assert all(len(text.replace("\n", "")) >= 40 for text in cut[:-1])
    assert cuts[0] != cuts[1]


def test_an_opening_ends_at_a_stop_and_not_after_mr():
    paragraph = "One two three four five six seven eight Mr. Ten eleven twelve, thirteen" + " more" * 40
    assert all(held_out.opening(paragraph, Random(seed)).endswith("twelve,") for seed in range(20))
    assert len(held_out.opening("word " * 60, Random(0)).split()) == 16


def test_prompts_are_openings_of_paragraphs_of_every_novel():
    long = {novel: [f"{novel} {number} " + "word, " * 60 for number in range(20)] for novel in ("one", "two")}
    held = {novel: [long[novel], ["Nine words of it, said he, and he left."] * 20] for novel in long}
    prompts = held_out.prompts(held, "seed")
    assert len(prompts) == len(set(prompts)) == 32
    assert sum(bool(re.match(r"one \d+ word,", prompt)) for prompt in prompts) == 16


def test_texts_stop_before_they_are_too_large():
    held = {"one": [[f"{number} " + "x" * 998 for number in range(300)]]}
    texts = held_out.texts(held, "seed", 200, 300)
    assert 130_000 < sum(map(len, texts)) <= held_out.TEXT_BYTES
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
