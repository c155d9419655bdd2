"""Answers of servers as log-probabilities of listed tokens: K or K + 1 entries, bad numbers."""

import math

import numpy as np
import pytest

from kleash.engines.endpoints.dialects import SGLANG, VLLM, Query
from kleash.engines.endpoints.listed_logprobs import AnswerError, ListedLogprobs

LISTED = {7: -0.5, 3: -1.5, 9: -2.5}


def listed(entries, token, top=3, vocab_size=100):
    return ListedLogprobs.of([token], [entries], top=top, vocab_size=vocab_size)


def test_a_token_is_listed_once_if_it_is_among_the_likeliest():
    answer = listed(LISTED, 3)
    assert dict(zip(answer.listed_ids[0].tolist(), answer.listed_logp[0].tolist(), strict=True)) == LISTED
    assert (answer.token_logp[0], answer.unlisted_most[0], answer.rank[0]) == (-1.5, -2.5, 1)
    answer = listed({**LISTED, 50: -9.0}, 50)
    # Whether a token is listed must not depend on the scored one.
    assert answer.listed_ids.tolist() == [list(LISTED)]
    assert (answer.token_logp[0], answer.unlisted_most[0], answer.rank[0]) == (-9.0, -2.5, -1)


def test_the_whole_vocabulary_and_probabilities_of_zero_and_one_are_read():
    assert listed({0: -0.5, 1: -1.5, 2: -2.5}, 1, top=20, vocab_size=3).unlisted_most[0] == -math.inf
    answer = listed({7: 1e-7, 3: -9999.0, 9: -math.inf}, 7)
    assert answer.listed_logp.tolist() == [[0.0, -math.inf, -math.inf]]


@pytest.mark.parametrize(
    ("more", "message"), [({1: -3.0, 2: -4.0}, "lists 5 tokens where 3"), ({3: -2.0}, "leaves a token out")]
)
def test_lists_of_other_tokens_than_the_likeliest_are_refused(more, message):
    with pytest.raises(AnswerError, match=message):
        listed({7: -0.5, 5: -1.5, 9: -2.5, **more}, 3 if 3 in more else 7)


QUERY = Query(token_ids=(0, 7), scored=1, top=1, model="m", vocab_size=100)


@pytest.mark.parametrize("token", ["7x", -7, True, 7.5, None, "9" * 5000])
@pytest.mark.parametrize("logp", ["x", [1.0], -0.5])
def test_an_answer_of_another_form_is_refused(token, logp):
    """Also where only one of both is wrong, and where fields are missing."""
    for answer in (
        {"choices": [{"prompt_logprobs": [None, {token: {"logprob": logp}}]}]},
        {"choices": []},
        [],
        None,
    ):
        with pytest.raises(AnswerError):
            VLLM.read(answer, QUERY)
    for row in ([logp, token, ""], [logp]):
        meta = {"input_token_logprobs": [row], "input_top_logprobs": [[row]]}
        with pytest.raises(AnswerError):
            SGLANG.read({"meta_info": meta}, QUERY)


def test_token_ids_may_be_digits_or_numbers():
    answer = {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -0.5, "decoded_token": "a"}}]}]}
    meta = {"input_token_logprobs": [[-0.5, 7, "a"]], "input_top_logprobs": [[[-0.5, 7, "a"]]]}
    for read in (VLLM.read(answer, QUERY), SGLANG.read({"meta_info": meta}, QUERY)):
        np.testing.assert_array_equal(read.listed_ids, [[7]])
        assert read.token_logp.tolist() == [-0.5] and read.texts == {7: "a"}
