"""Faults of servers: each is one sentence, passing ones are tried again, and no key is in any of them."""

import socket
import threading

import numpy as np
import pytest
from scoring_cases import sequence_of
from transformers import AutoTokenizer

from kleash.engines.endpoints import JSONClient, connect, find_model, http_client
from kleash.errors import EndpointError, OptionError
from kleash.models import TokenizerMismatchError
from kleash.shipped import shipped_folder

KEY = "sk-not/to-be-seen"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(shipped_folder("reference"))


@pytest.fixture
def pauses(monkeypatch):
    """Pauses between retries, which are noted and not made; other threads, as that of tqdm, wait as ever."""
    seconds, wait, caller = [], threading.Event.wait, threading.current_thread()

    def noted(event, timeout=None):
        return seconds.append(timeout) if threading.current_thread() is caller else wait(event, timeout)

    monkeypatch.setattr("threading.Event.wait", noted)
    return seconds


@pytest.fixture
def connected(server, tokenizer):
    """Connects to a dialect with a fault."""

    def run(dialect, fault="none", *, model=None, top=5, tokenizer=tokenizer, **options):
        client = JSONClient(
            url=f"{server}/{dialect}/{fault}",
            subject="the policy's server",
            key_variable="KLEASH_POLICY_API_KEY",
            **{"api_key": KEY, "retries": 2, **options},
        )
        return connect(client, find_model(client, model), tokenizer=tokenizer, vocab_size=2560, top=top)

    return run


@pytest.mark.parametrize(("dialect", "name"), [("vllm", "vLLM"), ("sglang", "SGLang"), ("proxy", "vLLM")])
def test_the_dialect_is_that_of_the_server(connected, dialect, name):
    endpoint = connected(dialect)
    assert (endpoint.dialect.name, endpoint.probe.model, endpoint.probe.top) == (name, "policy", 5)
    assert endpoint.context_length == 400


@pytest.mark.parametrize(
    ("dialect", "fault", "message"),
    [
        ("vllm", "truncated", r"not JSON|broke off its answer.* \(tries: 3\); see that it runs"),
        ("vllm", "html", r"bytes that are not JSON \(tries: 3\)"),
        ("vllm", "nested", r"100000 bytes that are not JSON \(tries: 3\)"),
        ("vllm", "close", r"broke off its answer \(.*\) \(tries: 3\)"),
        ("vllm", "429", r"answers 429: '.*busy Bearer \*\*\*.*' \(tries: 3\)"),
        ("vllm", "401", r"answers 401: .*; set KLEASH_POLICY_API_KEY to its key$"),
        ("vllm", "400", r"answers 400: '.*no, .*Bearer \*\*\*"),
        ("vllm", "redirect", r"answers 307$"),
        ("vllm", "reflected", r"has not the form of vLLM's \(.*\); serve the model by vLLM or SGLang"),
        ("sglang", "reflected", r"has not the form of SGLang's"),
        ("vllm", "counts", r"prompt_logprobs where \d+ tokens were sent"),
        ("vllm", "fewer", r"lists 4 tokens where 5 were asked for"),
        ("vllm", "stale", r"lacks the log-probability of token \d+, at scored token 1"),
        ("vllm", "nan", r"has nan as a log-probability"),
        ("vllm", "logits", r"has \d\.\d+ as a log-probability; .* natural logarithms of probabilities"),
        ("vllm", "foreign", r"has tokens from 1000\d+ .* of another model|lacks the log-probability"),
        ("vllm", "negative", r"lists probabilities that sum to at most \d\.\d+e-\d+ at scored token 0"),
        ("vllm", "rounded", r"has log-probabilities rounded to 3 decimals"),
        ("vllm", "choices", r"has not the form of vLLM's"),
        ("sglang", "counts", r"has \d+ input_token_logprobs where \d+ tokens were to be scored"),
        ("sglang", "fewer", r"lists 4 tokens where 5 were asked for"),
        ("sglang", "nan", r"lists probabilities that sum to at most 0 at scored token 0"),
        ("sglang", "foreign", r"has tokens from \d+ to 100\d+, .* of another model|scores token"),
        ("llama", "none", r"has not the form of vLLM's .*; serve the model .* or name a GGUF file itself"),
        ("vllm", "models", r"has 2 models \(policy, other\); choose one with --policy-model"),
        ("vllm", "nomodels", r"answers 404"),
    ],
)
@pytest.mark.usefixtures("pauses")
def test_a_fault_is_a_sentence(connected, dialect, fault, message):
    with pytest.raises(EndpointError, match=message) as raised:
        connected(dialect, fault)
    sentence = str(raised.value)
    assert sentence.startswith("the policy's server") and "\n" not in sentence
    assert "to-be-seen" not in sentence and "\x1b" not in sentence


def test_an_answer_without_end_is_not_read_nor_a_missing_one_waited_for(connected, monkeypatch):
    with pytest.raises(EndpointError, match=r"broke off its answer \(timed out\) \(tries: 1\)"):
        connected("vllm", "hang", timeout_seconds=0.4, retries=0)
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 2**22)
    with pytest.raises(EndpointError, match="sends an answer of more than 4 MiB"):
        connected("vllm", "endless")


def test_another_model_behind_the_same_name_is_noticed(connected):
    endpoint = connected("vllm", "swapped")
    for _ in range(3):
        endpoint.require_same_model()
    with pytest.raises(EndpointError, match=r"serves another model than .* by 0\.\d+ nats in the median"):
        endpoint.require_same_model()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_another_tokenizer_is_refused_in_the_answer_that_first_shows_it(connected, dialect):
    with pytest.raises(TokenizerMismatchError, match=r"has another tokenizer: .* is 'wrong' there"):
        connected(dialect, "texts")
    endpoint = connected(dialect, "renamed")  # the probe has none of the two tokens
    endpoint.score(sequence_of((0, 10), (11, 12)))
    with pytest.raises(TokenizerMismatchError, match=r"has another tokenizer: .*token 2001 is '.*' there"):
        endpoint.score(sequence_of((0, 10), (2001, 12)))


def test_a_special_token_may_contain_the_mark_of_a_space(connected):
    tokenizer = AutoTokenizer.from_pretrained(shipped_folder("reference"), pad_token="<\u2581pad\u2581>")
    connected("vllm", tokenizer=tokenizer).check_texts({tokenizer.pad_token_id: "<\u2581pad\u2581>"})


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_an_adapter_is_asked_for_by_its_name(connected, dialect):
    base, adapter = (connected(dialect, "adapter", model=name) for name in ("policy", "lora"))
    assert base.context_length == adapter.context_length == 400  # which the list has for the base alone
    assert base.probe_logps == connected(dialect).probe_logps
    assert min(abs(a - b) for a, b in zip(base.probe_logps, adapter.probe_logps, strict=True)) > 1e-6


def test_the_last_token_of_the_vocabulary_is_scored(connected):
    window = sequence_of((0, 10), (2559, 11))
    by_vllm, by_sglang = (connected(dialect).score(window).token_logp for dialect in ("vllm", "sglang"))
    assert by_vllm.tolist() == by_sglang.tolist()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_listed_tokens_without_probability(connected, dialect):
    """vLLM writes their log-probabilities as -9999, and SGLang as null."""
    answer = connected(dialect).score(sequence_of((0, 10), (11,)))
    likeliest = int(answer.listed_ids[0, answer.listed_logp[0].argmax()])
    answer = connected(dialect, "zeros", top=50).score(sequence_of((0, 10), (likeliest,)))
    assert (answer.listed_logp[0, :30] > -20).all() and (answer.listed_logp[0, 30:] == -np.inf).all()
    assert answer.unlisted_most[0] == -np.inf


def test_a_model_that_the_server_lacks_is_named(connected):
    with pytest.raises(EndpointError, match="has no model 'policy-2'; it has policy"):
        connected("vllm", model="policy-2")
    assert connected("vllm", "models", model="policy").probe.model == "policy"


@pytest.mark.parametrize("fault", ["truncated-2", "html-2", "close-2"])
def test_passing_faults_are_tried_again_after_growing_pauses(connected, pauses, fault):
    connected("vllm", fault)
    assert len(pauses) == 2 and 0.25 <= pauses[0] <= 0.75 and 0.5 <= pauses[1] <= 1.5


def test_a_pause_that_the_server_asks_for_is_kept_to(connected, pauses):
    connected("vllm", "429-1")  # Retry-After: 7
    assert pauses == [7.0]


@pytest.mark.usefixtures("pauses")
def test_an_address_that_nobody_answers(monkeypatch):
    """Proxies of the environment are not used."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        client = JSONClient(url=url, subject="the server", key_variable="KEY", retries=1)
        with pytest.raises(EndpointError, match=r"cannot be reached, .* refused\) \(tries: 2\)"):
            find_model(client, None)


def test_a_closed_client_sends_no_more(connected):
    client = connected("vllm").client
    client.is_closed.set()
    with pytest.raises(EndpointError, match="was cancelled"):
        client.request("/v1/models")


@pytest.mark.usefixtures("pauses")
def test_a_key_that_no_header_can_hold_a_short_one_and_one_that_no_text_has(connected):
    with pytest.raises(EndpointError, match=r"answers 429: '.*Bearer \*\*\*"):
        connected("vllm", "429", api_key="Q7q")
    with pytest.raises(OptionError, match="KLEASH_POLICY_API_KEY has characters") as raised:
        connected("vllm", api_key="sk\nInjected: 1")
    assert "Injected" not in str(raised.value)
    assert KEY not in repr(connected("vllm"))


def test_a_sequence_leaves_room_for_the_token_that_a_server_generates(connected):
    lengths = (None, 300, 400, 500)
    assert [connected("vllm").max_input_tokens(length) for length in lengths] == [398, 300, 398, 398]
