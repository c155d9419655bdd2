"""Faults of servers: each is one sentence, passing ones are tried again, and no key is in any of them."""

import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kleash.engines.endpoints import Endpoint, JSONClient, connect, find_model
from kleash.engines.endpoints.answer_precision import LogprobPrecision
from kleash.errors import EndpointError, OptionError
from kleash.models import TokenizerMismatchError, TokenSequence
from kleash.shipped import shipped_folder

KEY = "sk-not/to-be-seen"
Connect = Callable[..., Endpoint]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(shipped_folder("reference"))


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def connected(server: str, tokenizer: PreTrainedTokenizerBase, pauses: list[float]) -> Connect:
    """Connects to a dialect with a fault; pauses between retries are noted and not made."""

    def run(
        dialect: str, fault: str = "none", *, model: str | None = None, top: int = 5, **options: Any
    ) -> Endpoint:
        def pause(seconds: float) -> bool:
            pauses.append(seconds)
            return False

        client = JSONClient(
            url=f"{server}/{dialect}/{fault}",
            subject="the policy's server",
            key_variable="KLEASH_POLICY_API_KEY",
            **{"api_key": KEY, "retries": 2, "pause": pause, **options},
        )
        return connect(client, find_model(client, model), tokenizer=tokenizer, vocab_size=2560, top=top)

    return run


@pytest.mark.parametrize(
    ("dialect", "name"),
    [("vllm", "vLLM"), ("sglang", "SGLang"), ("proxy", "vLLM")],
)
def test_the_dialect_is_that_of_the_server(connected: Connect, dialect: str, name: str) -> None:
    endpoint = connected(dialect)
    assert (endpoint.dialect.name, endpoint.model, endpoint.top) == (name, "policy", 5)
    assert endpoint.context_length == 400


@pytest.mark.parametrize(
    ("dialect", "fault", "message"),
    [
        ("vllm", "truncated", r"broke off its answer.* \(tried 3 times\); see that it runs"),
        ("vllm", "html", r"not JSON, .* \(tried 3 times\); .* that its address is that of the API"),
        ("vllm", "deep", r"bytes that are not JSON"),
        ("vllm", "close", r"broke off its answer \(RemoteDisconnected\) \(tried 3 times\); .* or https"),
        ("vllm", "429", r"answered 429: '\\x1b\[31mbusy Bearer \*\*\*' \(tried 3 times\)"),
        ("vllm", "500", r"answered 500: .* \(tried 3 times\)"),
        ("vllm", "long", r"answered 429: 'slow down' and asks for a pause of 7200 s"),
        ("vllm", "401", r"refuses the request with 401 \(KLEASH_POLICY_API_KEY\); check the key"),
        (
            "vllm",
            "400",
            r"refuses the request with 400: 'no, \\x1b\[31mBearer \*\*\*'; a smaller --top-logprobs or --window",
        ),
        (
            "proxy",
            "400",
            r"refuses the request with 400: .*; serve the model with vLLM or SGLang",
        ),
        ("vllm", "404", r"refuses the request with 404: .*; see that its address is right"),
        ("proxy", "500", r"server answered 500: .* \(tried 3 times\); see that it runs"),
        ("proxy", "401", r"server refuses the request with 401 \(KLEASH_POLICY_API_KEY\); check the key$"),
        (
            "vllm",
            "redirect",
            r"sends to another address \(https://elsewhere.example/v1\?key=Bearer%20\*\*\*\); give that",
        ),
        ("vllm", "reflected", r"has 'Bearer \*\*\*' in place of choices"),
        ("sglang", "reflected", r"has 'Bearer \*\*\*' in place of meta_info"),
        ("vllm", "error200", r"answered with an error: 'overloaded, Bearer \*\*\*' \(tried 3 times\)"),
        ("vllm", "counts", r"prompt_logprobs where \d+ were sent"),
        ("vllm", "fewer", r"lists 4 tokens( beside token \d+)? where 5 were asked for"),
        (
            "vllm",
            "stale",
            r"lacks the log-probability of token \d+ at position 2, as after .*--no-enable-prefix-caching",
        ),
        ("vllm", "nan", r"has nan as a log-probability"),
        (
            "vllm",
            "logits",
            r"has \d\.\d+ as a log-probability; see that it returns natural logarithms of probabilities",
        ),
        ("vllm", "foreign", r"has token 100\d+, and the local model has 2560 tokens: it is of another model"),
        ("sglang", "counts", r"has \d+ input_token_logprobs where \d+ were sent"),
        ("sglang", "fewer", r"has 4 tokens at a position where 5 were sent or asked for"),
        ("sglang", "nan", r"has null in place of all log-probabilities of a position, as for NaN"),
        ("vllm", "negative", r"lists probabilities that sum to at most \d\.\d+e-\d+ at scored token 0"),
        ("sglang", "negative", r"lists probabilities that sum to at most"),
        ("vllm", "integer", r"has 10{39} as a log-probability"),
        ("vllm", "choices", r"has 2 choices where 1 were sent or asked for"),
        ("vllm", "chunk", r"broke off its answer \(\w+\) \(tried 3 times\)"),
        ("vllm", "endless", r"sends an answer of more than 16 MiB; see that the address is that of an infer"),
        ("vllm", "object200", r"answered with an error: 'no prompt, Bearer \*\*\*' \(tried 3 times\)"),
        ("sglang", "foreign", r"has token 100\d+, and the local model"),
        ("sglang", "truncated", r"broke off its answer"),
        ("llama", "none", r"is llama-cpp-python; kleash reads the GGUF file itself"),
        ("llamacpp", "none", r"is llama.cpp's own server; kleash reads the GGUF file itself"),
        ("vllm", "models", r"has 2 models \(policy, other\); choose one with --policy-model"),
        (
            "vllm",
            "nomodels",
            r"has no list of models at http://.*/vllm/nomodels/v1/models; see that its address",
        ),
    ],
)
def test_a_fault_is_a_sentence(connected: Connect, dialect: str, fault: str, message: str) -> None:
    with pytest.raises(EndpointError, match=message) as raised:
        connected(dialect, fault)
    sentence = str(raised.value)
    assert sentence.startswith("the policy's server") and "\n" not in sentence
    assert "to-be-seen" not in sentence and "\x1b" not in sentence


def test_a_compressed_answer_is_unpacked(connected: Connect) -> None:
    assert connected("vllm", "gzip").probe_logps == connected("vllm").probe_logps


def test_another_model_behind_the_same_name_is_noticed(connected: Connect) -> None:
    endpoint = connected("vllm", "swapped")
    for _ in range(3):
        endpoint.require_same_model()
    with pytest.raises(EndpointError, match=r"serves another model than .* by 0\.\d+ nats in the median"):
        endpoint.require_same_model()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_another_tokenizer_is_refused(connected: Connect, dialect: str) -> None:
    with pytest.raises(
        TokenizerMismatchError, match=r"has another tokenizer: .* is 'wrong' there and '.*' here"
    ):
        connected(dialect, "texts")


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_token_of_another_text_is_found_in_the_answer_that_first_has_it(
    connected: Connect, dialect: str
) -> None:
    endpoint = connected(dialect, "renamed")  # the probe has none of the two tokens
    endpoint.score(sequence((0, 10), (11, 12)))
    with pytest.raises(TokenizerMismatchError, match=r"has another tokenizer: .*token 2001 is '.*' there"):
        endpoint.score(sequence((0, 10), (2001, 12)))


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_an_adapter_is_asked_for_by_its_name(connected: Connect, dialect: str) -> None:
    base, adapter = (connected(dialect, "adapter", model=name) for name in ("policy", "lora"))
    assert base.context_length == adapter.context_length == 400  # which the list has for the base alone
    assert base.probe_logps == connected(dialect).probe_logps
    assert min(abs(a - b) for a, b in zip(base.probe_logps, adapter.probe_logps, strict=True)) > 1e-6


def test_the_last_token_of_the_vocabulary_is_scored(connected: Connect) -> None:
    window = sequence((0, 10), (2559, 11))
    by_vllm, by_sglang = (connected(dialect).score(window).token_logp for dialect in ("vllm", "sglang"))
    assert by_vllm.tolist() == by_sglang.tolist()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_listed_tokens_without_probability(connected: Connect, dialect: str) -> None:
    """vLLM writes their log-probabilities as -9999, and SGLang as null."""
    likeliest = int(connected(dialect).score(sequence((0, 10), (11,))).top1[0])
    answer = connected(dialect, "zeros", top=50).score(sequence((0, 10), (likeliest,)))
    assert (answer.listed_logp[0, :30] > -20).all() and (answer.listed_logp[0, 30:] == -np.inf).all()
    assert answer.unlisted_most[0] == -np.inf


def test_the_precision_is_that_of_the_numbers(connected: Connect) -> None:
    assert connected("vllm").precision == LogprobPrecision()
    assert connected("vllm", "float16").precision.name == "float16"


def test_a_model_that_the_server_lacks_is_named(connected: Connect) -> None:
    with pytest.raises(EndpointError, match="has no model 'policy-2'; it has policy"):
        connected("vllm", model="policy-2")
    assert connected("vllm", "models", model="policy").model == "policy"


@pytest.mark.parametrize("fault", ["truncated-2", "500-2", "close-2", "html-2"])
def test_passing_faults_are_tried_again_after_growing_pauses(
    connected: Connect, pauses: list[float], fault: str
) -> None:
    connected("vllm", fault)
    assert len(pauses) == 2
    assert 0.25 <= pauses[0] <= 0.75 and 0.5 <= pauses[1] <= 1.5


def test_a_pause_that_the_server_asks_for_is_kept_to(connected: Connect, pauses: list[float]) -> None:
    connected("vllm", "429-1")  # Retry-After: 0
    assert len(pauses) == 1 and 0.25 <= pauses[0] <= 1.0


@pytest.mark.parametrize("fault", ["drip", "hang"])
def test_the_time_limit_is_that_of_the_whole_answer(connected: Connect, fault: str) -> None:
    with pytest.raises(EndpointError, match=r"did not finish its answer within 0.4 s .*\(tried once\)"):
        connected("vllm", fault, timeout_seconds=0.4, retries=0)


def test_an_address_that_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        client = JSONClient(
            url=f"http://127.0.0.1:{free.getsockname()[1]}",
            subject="the server",
            key_variable="KEY",
            retries=1,
            pause=lambda seconds: False,
        )
        with pytest.raises(
            EndpointError, match=r"refused \(proxies of the environment are not used\) \(tried 2 times\)"
        ):
            find_model(client, None)


def test_a_server_without_https_is_not_asked_again(server: str, pauses: list[float]) -> None:
    client = JSONClient(url=server.replace("http", "https"), subject="the server", key_variable="KEY")
    with pytest.raises(
        EndpointError, match=r"does not answer as a server of https .*; see whether its address be"
    ):
        find_model(client, None)
    assert not pauses


def test_a_short_key_is_removed_as_a_word(connected: Connect) -> None:
    with pytest.raises(
        EndpointError, match=r"^the policy's server answered 429: '.*busy Bearer \*\*\*' \(tr"
    ):
        connected("vllm", "429", api_key="s")


def test_a_closed_client_sends_no_more(connected: Connect) -> None:
    client = connected("vllm").client
    client.close()
    with pytest.raises(EndpointError, match="was cancelled"):
        client.get("/v1/models")


def test_a_key_that_no_header_can_hold() -> None:
    with pytest.raises(OptionError, match="KLEASH_POLICY_API_KEY has characters") as raised:
        JSONClient(
            url="http://x", subject="s", key_variable="KLEASH_POLICY_API_KEY", api_key="sk\nInjected: 1"
        )
    assert "Injected" not in str(raised.value)


def test_the_key_is_not_in_the_representation(connected: Connect) -> None:
    assert KEY not in repr(connected("vllm"))


def sequence(prompt: tuple[int, ...], response: tuple[int, ...]) -> TokenSequence:
    return TokenSequence(
        prompt_id=0, sample_id=0, prompt_ids=prompt, response_ids=response, prompt_text="", response_text=""
    )


def test_a_sequence_leaves_room_for_the_token_that_a_server_generates(connected: Connect) -> None:
    lengths = (None, 300, 400, 500)
    assert [connected("vllm").max_input_tokens(length) for length in lengths] == [398, 300, 398, 398]
