"""Generation: against plain recomputation with the same noise, and against transformers' own sampler."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scipy.stats import chisquare, kstest
from tiny_models import ARCHITECTURES, double_logits, save_tiny, tiny_tokenizer
from transformers import (
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kleash.errors import NonFiniteError, OptionError
from kleash.models import (
    Pair,
    Prompt,
    Sampling,
    exponentials,
    generate,
    hash_tokens,
    length_batches,
    load_pair,
)

TEXTS = ((0, 50, 60, 70), (0,), (0, 9, 8, 7, 6, 5, 4, 3, 200, 201, 202, 203), (0, 100, 101))


def prompts(texts=TEXTS):
    copies: dict[tuple[int, ...], int] = {}
    made = []
    for number, text in enumerate(texts):
        copy = copies.get(text, 0)
        copies[text] = copy + 1
        made.append(
            Prompt(prompt_id=number, token_ids=text, text="", prompt_hash=hash_tokens(text), copy=copy)
        )
    return made


def drawn_by_hand(folder, prompt, sample, sampling, ends=(1,)):
    """The same response, by reading the whole text again in float64 for each token."""
    text, response = list(prompt.token_ids), []
    while len(response) < sampling.max_new_tokens and not set(ends) & set(response):
        logp = log_softmax(double_logits(folder, text)[-1].numpy() / sampling.temperature)
        uniform = (
            np.random.Philox(
                key=np.array([sampling.seed, int(prompt.prompt_hash, 16)], dtype=np.uint64),
                counter=np.array([0, 0, sample, len(response)], dtype=np.uint64),
            ).random_raw(len(logp))
            // 2**11
            + 0.5
        ) / 2**53
        response.append(int((np.exp(logp) / -np.log(uniform)).argmax()))
        text.append(response[-1])
    return tuple(response)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_draws_are_those_of_the_whole_text_read_again(folders, architecture):
    policy, _ = folders(architecture)
    model = load_pair(str(policy), str(policy)).policy
    sampling = Sampling(max_new_tokens=12, temperature=0.8, seed=3)
    for one, prompt in zip(generate(model, prompts(), sampling), prompts(), strict=True):
        assert one.response_ids == drawn_by_hand(policy, prompt, 0, sampling)
        assert one.prompt_ids == prompt.token_ids


def responses(found):
    return [one.response_ids for one in found]


def test_draws_depend_on_neither_batch_nor_neighbours_nor_order(pair: Pair):
    sampling = Sampling(max_new_tokens=20, samples_per_prompt=2)
    together = generate(pair.policy, prompts(), sampling)
    assert [(one.prompt_id, one.sample_id) for one in together] == [
        (p, s) for p in range(4) for s in range(2)
    ]
    assert len(set(responses(together))) == 8
    for batch_tokens in (1, 25):
        assert responses(generate(pair.policy, prompts(), sampling, batch_tokens=batch_tokens)) == responses(
            together
        )
    backwards = generate(pair.policy, prompts()[::-1], sampling)
    assert {one.response_ids for one in backwards} == set(responses(together))
    more = generate(pair.policy, prompts(), replace(sampling, samples_per_prompt=3))
    assert responses(more)[0:2] == responses(together)[0:2]
    other = generate(pair.policy, prompts(), replace(sampling, seed=1))
    assert not set(responses(other)) & set(responses(together))


def test_a_copy_of_a_prompt_draws_further_samples(pair: Pair):
    sampling = Sampling(max_new_tokens=8, samples_per_prompt=2)
    twice = generate(pair.policy, prompts((TEXTS[0], TEXTS[0])), sampling)
    at_once = generate(pair.policy, prompts(TEXTS[:1]), replace(sampling, samples_per_prompt=4))
    assert responses(twice) == responses(at_once)
    assert [one.sample_id for one in twice] == [0, 1, 0, 1]


def test_logp_sampled_is_the_policys_own_without_truncation(folders, pair: Pair):
    policy, _ = folders("llama")
    for one in generate(pair.policy, prompts(), Sampling(max_new_tokens=15, temperature=1.3)):
        z = double_logits(policy, [*one.prompt_ids, *one.response_ids]).numpy() / 1.3
        rows = log_softmax(z[len(one.prompt_ids) - 1 : -1], axis=-1)
        wanted = rows[np.arange(len(one.response_ids)), one.response_ids]
        assert one.logp_sampled is not None
        assert one.logp_sampled.dtype == np.float32
        np.testing.assert_allclose(one.logp_sampled, wanted, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize(
    ("cut", "warpers"),
    [
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        ({"top_k": 9, "top_p": 0.8}, [TopKLogitsWarper(9), TopPLogitsWarper(0.8)]),
    ],
    ids=["top_k", "top_p", "min_p", "both"],
)
def test_truncated_draws_have_the_probability_that_transformers_gives_them(folders, pair: Pair, cut, warpers):
    policy, _ = folders("llama")
    sampling = Sampling(max_new_tokens=15, temperature=0.9, **cut)
    found = generate(pair.policy, prompts(), sampling)
    free = generate(pair.policy, prompts(), replace(sampling, top_k=None, top_p=None, min_p=None))
    assert responses(found) != responses(free)
    for one in found:
        z = double_logits(policy, [*one.prompt_ids, *one.response_ids])[len(one.prompt_ids) - 1 : -1] / 0.9
        rows = LogitsProcessorList(warpers)(None, z).log_softmax(-1).numpy()
        wanted = rows[np.arange(len(one.response_ids)), one.response_ids]
        np.testing.assert_allclose(one.logp_sampled, wanted, rtol=3e-5, atol=3e-6)


def test_temperature_zero_takes_the_likeliest(folders, pair: Pair):
    policy, _ = folders("llama")
    for one in generate(pair.policy, prompts(), Sampling(max_new_tokens=10, temperature=0.0)):
        rows = double_logits(policy, [*one.prompt_ids, *one.response_ids])[len(one.prompt_ids) - 1 : -1]
        assert one.response_ids == tuple(rows.argmax(-1).tolist())
        assert one.logp_sampled is not None
        assert (one.logp_sampled == 0).all()


def test_a_response_ends_with_its_end_token(pair: Pair):
    free = generate(pair.policy, prompts(), Sampling(max_new_tokens=30, seed=1))
    assert {one.finish_reason for one in free} == {"length"}
    ends = (free[0].response_ids[4], free[2].response_ids[7])
    told = []
    ended = generate(
        replace(pair.policy, ends=ends), prompts(), Sampling(max_new_tokens=30, seed=1), drawn=told.append
    )
    for whole, one in zip(free, ended, strict=True):
        stops = [place for place, token in enumerate(whole.response_ids) if token in ends]
        length = stops[0] + 1 if stops else 30
        assert one.response_ids == whole.response_ids[:length]
        assert one.logp_sampled is not None
        np.testing.assert_allclose(one.logp_sampled, whole.logp_sampled[:length], rtol=1e-4, atol=1e-5)
        assert one.finish_reason == ("stop" if stops else "length")
    assert len({len(one.response_ids) for one in ended}) > 1
    assert sum(told) == sum(len(one.response_ids) for one in ended)
    assert told[0] == 4


def test_an_end_at_the_last_place_is_a_stop(pair: Pair):
    free = generate(pair.policy, prompts(TEXTS[:1]), Sampling(max_new_tokens=5))
    (one,) = generate(
        replace(pair.policy, ends=free[0].response_ids[4:]), prompts(TEXTS[:1]), Sampling(max_new_tokens=5)
    )
    assert one.finish_reason == "stop"


@pytest.mark.parametrize("length", [125, 128])
def test_the_context_ends_a_response(pair: Pair, length):
    full = prompts((tuple(range(3, 3 + length)), (0,)))
    long, short = generate(pair.policy, full, Sampling(max_new_tokens=20))
    assert len(long.response_ids) == 128 - length + 1
    assert (long.finish_reason, len(short.response_ids)) == ("length", 20)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_after_the_prompts_one_token_at_a_time_is_read(folders, architecture):
    policy, _ = folders(architecture)
    model = load_pair(str(policy), str(policy)).policy
    shapes = []
    handle = model.body.register_forward_pre_hook(
        lambda _, args, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    generate(replace(model, ends=()), prompts(), Sampling(max_new_tokens=5))
    handle.remove()
    assert shapes == [(4, 12), (1, 1), *[(4, 1)] * 4]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_network_without_a_cache_draws_the_same(folders, architecture):
    policy, _ = folders(architecture)
    model = load_pair(str(policy), str(policy)).policy
    sampling = Sampling(max_new_tokens=9)

    class Plain(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            assert not use_cache
            return model.body(input_ids=input_ids, use_cache=False)

    plain = replace(model, body=Plain())
    assert responses(generate(plain, prompts(), sampling)) == responses(generate(model, prompts(), sampling))


def test_a_network_that_reads_its_padding_is_read_without(folders):
    policy, _ = folders("llama")
    model = load_pair(str(policy), str(policy)).policy
    sampling = Sampling(max_new_tokens=9)
    wanted = generate(model, prompts(), sampling)

    class Blind(torch.nn.Module):
        def forward(self, input_ids, use_cache, attention_mask=None, past_key_values=None):
            return model.body(input_ids=input_ids, use_cache=use_cache, past_key_values=past_key_values)

    assert responses(generate(replace(model, body=Blind()), prompts(), sampling)) == responses(wanted)


def test_a_recurrent_network_draws_from_its_own_distribution(tmp_path):
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=320,
        hidden_size=16,
        num_hidden_layers=1,
        state_size=4,
        initializer_range=0.3,
        eos_token_id=1,
    )
    MambaForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = load_pair(str(tmp_path), str(tmp_path)).policy
    sampling = Sampling(max_new_tokens=6)
    for one, prompt in zip(generate(model, prompts(), sampling), prompts(), strict=True):
        assert one.response_ids == drawn_by_hand(tmp_path, prompt, 0, sampling)


def test_a_model_through_its_logits_draws_the_same(folders):
    from kleash.linear import Head

    policy, _ = folders("llama")
    model = load_pair(str(policy), str(policy)).policy
    through = replace(model, head=Head(weight=None))
    sampling = Sampling(max_new_tokens=9)
    found, wanted = generate(through, prompts(), sampling), generate(model, prompts(), sampling)
    assert responses(found) == responses(wanted)


def test_the_distribution_is_that_of_the_model(folders):
    """One token after one prompt, drawn often: chi-squared against the exact probabilities."""
    policy, _ = folders("gemma2")
    model = load_pair(str(policy), str(policy)).policy
    many = generate(model, prompts(TEXTS[:1]), Sampling(max_new_tokens=1, samples_per_prompt=4000))
    probs = double_logits(policy, list(TEXTS[0]))[-1].softmax(-1).numpy()
    counts = np.bincount([one.response_ids[0] for one in many], minlength=320)
    likely = probs > 0.004
    observed = [*counts[likely], counts[~likely].sum()]
    wanted = 4000 * np.array([*probs[likely], probs[~likely].sum()])
    assert len(observed) > 20
    assert chisquare(observed, wanted).pvalue > 1e-3


def test_noise_is_exponential_and_keyed_by_everything():
    noise = exponentials(7, [("ff", 0, 0)], 20_000)
    assert noise.shape == (1, 20_000)
    assert kstest(noise[0], "expon").pvalue > 1e-3
    keys = [("ff", 0, 0), ("fe", 0, 0), ("ff", 1, 0), ("ff", 0, 1)]
    rows = exponentials(7, keys, 1000)
    np.testing.assert_array_equal(rows[0], noise[0, :1000])
    correlations = np.corrcoef(np.vstack([rows, exponentials(8, keys[:1], 1000)]))
    assert np.abs(correlations - np.eye(5)).max() < 0.15


def philox(key, counter):
    """Four raw numbers of Philox 4x64 with ten rounds, from its definition."""
    (a, b, c, d), (k0, k1), mask = counter, key, 2**64 - 1
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ k0, right & mask, (left >> 64) ^ d ^ k1, left & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return a, b, c, d


def test_noise_is_the_same_for_ever():
    """Numpy counts up before its first block. A change here would change what an interrupted run goes on with."""
    raw = [*philox((7, 0xFF), (1, 0, 3, 2)), *philox((7, 0xFF), (2, 0, 3, 2))]
    wanted = [-np.log(((number >> 11) + 0.5) / 2**53) for number in raw]
    np.testing.assert_allclose(exponentials(7, [("ff", 3, 2)], 8)[0], wanted, rtol=1e-14)
    np.testing.assert_allclose(exponentials(7, [("ff", 3, 2)], 6)[0], wanted[:6], rtol=1e-14)


def test_nan_names_the_prompt(folders, unhooked):
    policy, _ = folders("llama")
    model = load_pair(str(policy), str(policy)).policy
    with torch.no_grad():
        model.network.get_input_embeddings().weight[201] = torch.nan
    given = [replace(one, where=f"p.jsonl, line {one.prompt_id}") for one in prompts()]
    with pytest.raises(
        NonFiniteError,
        match=r"policy gives NaN or infinite logits for prompt 2, sample 0 \(p.jsonl, line 2\)",
    ):
        generate(model, given, Sampling())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_prompt": 0}, "samples_per_prompt is 0; it is at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "a temperature of -1.0 means nothing"),
        ({"temperature": float("inf")}, "a temperature of inf means nothing"),
    ],
)
def test_samplings_that_mean_nothing(options, message):
    with pytest.raises(OptionError, match=message):
        Sampling(**options)


def test_nothing_is_answered_by_nothing(pair: Pair):
    assert generate(pair.policy, [], Sampling()) == []


def test_batches_are_of_like_length_and_within_the_budget():
    lengths = [5, 1, 9, 5, 30, 2, 9]
    batches = length_batches(lengths, 20)
    assert batches == [[4], [2, 6], [0, 3, 5, 1]]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[n] for n in batch) <= 20
    assert length_batches(lengths, 20, rows=1) == [[4], [2], [6], [0], [3], [5], [1]]
    assert length_batches([], 20) == []
    with pytest.raises(OptionError, match="batch_tokens is 0"):
        length_batches(lengths, 0)


def test_an_end_token_in_training_is_found_in_the_end(tmp_path):
    """A model that always ends: one token each, and the batch is over."""
    folder = save_tiny(tmp_path / "model")
    model = load_pair(str(folder), str(folder)).policy
    model = replace(model, ends=tuple(range(320)))
    found = generate(model, prompts(), Sampling())
    assert [len(one.response_ids) for one in found] == [1, 1, 1, 1]
