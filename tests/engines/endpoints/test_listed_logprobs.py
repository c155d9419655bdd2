"""Answers of servers as log-probabilities of listed tokens: K or K + 1 entries, ambiguous texts, bad numbers."""

import math

import pytest
from tiny_models import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kleash.engines.endpoints.listed_logprobs import (
    AnswerError,
    VocabularyTexts,
    position_from_ids,
    position_from_texts,
    read_logprob,
    read_token_id,
)

LISTED = {7: -0.5, 3: -1.5, 9: -2.5}


def test_a_token_among_the_likeliest_is_listed_once() -> None:
    position = position_from_ids(LISTED, 3, top=3, vocab_size=100)
    assert position.listed == LISTED
    assert (position.token_logp, position.unlisted_most, position.rank) == (-1.5, -2.5, 1)
    assert (position.top1, position.top1_logp) == (7, -0.5)


def test_a_token_that_is_appended_is_not_among_the_likeliest() -> None:
    position = position_from_ids({**LISTED, 50: -9.0}, 50, top=3, vocab_size=100)
    assert position.listed == LISTED  # whether a token is listed must not depend on the scored one
    assert (position.token_logp, position.unlisted_most, position.rank) == (-9.0, -2.5, None)


def test_the_whole_vocabulary_leaves_nothing_unlisted() -> None:
    assert position_from_ids(LISTED, 3, top=20, vocab_size=3).unlisted_most == -math.inf


@pytest.mark.parametrize(
    ("entries", "token", "message"),
    [
        (LISTED, 4, "lacks the log-probability of token 4"),
        ({7: -0.5, 3: -1.5}, 3, "lists 2 tokens where 3 were asked for"),
        ({**LISTED, 1: -3.0, 2: -4.0}, 3, "lists 5 tokens where 3 were asked for"),
        ({**LISTED, 50: -2.0}, 50, "leaves a token out"),
    ],
)
def test_other_counts_are_refused(entries: dict[int, float], token: int, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        position_from_ids(entries, token, top=3, vocab_size=100)


def test_the_rank_of_a_listed_token_is_that_in_the_list() -> None:
    tied = {7: -0.5, 3: -1.5, 9: -1.5}  # vLLM gives the place in the list, or counts equal tokens
    assert [position_from_ids(tied, token, 3, 100, rank=2).rank for token in tied] == [0, 1, 1]


def test_a_rank_shows_that_a_likelier_token_is_missing() -> None:
    with pytest.raises(AnswerError, match="lists 2 tokens beside token 9 where 3 were asked for"):
        position_from_ids(LISTED, 9, top=3, vocab_size=100, rank=5)
    tied = {7: -0.5, 3: -1.5, 9: -1.5}  # of equal tokens, the rank counts all
    assert position_from_ids(tied, 9, top=3, vocab_size=100, rank=4).listed == tied


@pytest.mark.parametrize("value", [None, "x", True, math.nan, 0.5, math.inf, [1.0]])
def test_what_is_no_log_probability_is_refused(value: object) -> None:
    with pytest.raises(AnswerError, match="log-probability"):
        read_logprob(value)


def test_probabilities_of_zero_and_one_are_read() -> None:
    assert read_logprob(-9999.0) == read_logprob(-math.inf) == -math.inf
    assert read_logprob(1e-7) == read_logprob(0) == 0.0


@pytest.mark.parametrize("value", [None, "7x", -1, 10, "10", True, 2.0, "9" * 5000])
def test_what_is_no_token_is_refused(value: object) -> None:
    with pytest.raises(AnswerError, match="token"):
        read_token_id(value, 10)


def test_token_ids_may_be_digits() -> None:
    assert read_token_id("7", 10) == read_token_id(7, 10) == 7


@pytest.fixture(scope="module")
def vocabulary() -> VocabularyTexts:
    return VocabularyTexts(tokenizer=tiny_tokenizer(), size=320)


def test_texts_are_tokens_where_only_one_token_has_them(vocabulary: VocabularyTexts) -> None:
    sea = vocabulary.tokenizer.get_vocab()["Ġthe"]
    assert vocabulary.piece_of(sea) == " the"
    assert vocabulary.id_of(" the") == sea
    assert vocabulary.id_of("") is None  # parts of characters
    assert vocabulary.piece_of(319) == ""  # padding of the head


def test_a_text_that_a_part_of_a_character_also_has_is_no_token() -> None:
    """Byte-level tokenizers have tokens of a space and the first bytes of a quotation mark."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġâ"]
    vocabulary = {piece: token_id for token_id, piece in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "â")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    space, part = tokenizer.convert_tokens_to_ids(["Ġ", "Ġâ"])
    texts = VocabularyTexts(tokenizer=tokenizer, size=257)
    assert texts.piece_of(space) == " " and texts.piece_of(part) == " \N{REPLACEMENT CHARACTER}"
    assert texts.id_of(" ") is None  # llama-cpp-python writes both as " "
    assert texts.id_of("x") == tokenizer.convert_tokens_to_ids("x")


def test_texts_of_unknown_tokens_loosen_the_bound(vocabulary: VocabularyTexts) -> None:
    the, a = vocabulary.id_of(" the"), vocabulary.id_of("a")
    assert the is not None and a is not None
    likeliest = {" the": -0.5, "": -1.0, "b": -3.0}
    appended = position_from_texts({**likeliest, "a": -7.0}, a, "a", 3, vocabulary)
    assert appended.listed == {the: -0.5, vocabulary.id_of("b"): -3.0}
    assert (appended.unlisted_most, appended.is_complete, appended.top1) == (-1.0, True, the)
    among = position_from_texts(likeliest, the, " the", 3, vocabulary)
    assert among.listed[the] == -0.5 and among.rank == 0 and among.is_complete


def test_a_text_of_two_listed_tokens_leaves_the_bound_open(vocabulary: VocabularyTexts) -> None:
    a = vocabulary.id_of("a")
    assert a is not None
    position = position_from_texts({" the": -0.5, "a": -7.0}, a, "a", 2, vocabulary)
    assert not position.is_complete  # two tokens may have had one text, or "a" is the second likeliest
    assert (position.unlisted_most, position.top1, position.token_logp) == (0.0, None, -7.0)
    assert a not in position.listed
