"""Answers of servers as log-probabilities of listed tokens: K or K + 1 entries, bad numbers."""

import math

import pytest

from kleash.engines.endpoints.listed_logprobs import (
    AnswerError,
    position_from_ids,
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
