"""Generation: against plain recomputation with the same noise, and against transformers' own sampler."""

import math
from dataclasses import replace
from hashlib import blake2b
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, logsumexp
from scipy.stats import chisquare, kstest
from tiny_models import ARCHITECTURES, double_logits, tiny_tokenizer
from torch.overrides import TorchFunctionMode
from transformers import (
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kleash.errors import NonFiniteError, OptionError
from kleash.linear import Head
from kleash.models import Prompt, Sampling, draw, generate, keyed_draws, load_pair
from kleash.models.heads import extract_head
from kleash.sources.sequences import batch_by_length, hash_tokens

TEXTS = ((0, 50, 60, 70), (0,), (0, 9, 8, 7, 6, 5, 4, 3, 200, 201, 202, 203), (0, 100, 101))


def prompts(texts=TEXTS):
    return [
        Prompt(
            prompt_id=n, token_ids=text, text="", prompt_hash=hash_tokens(text), copy=texts[:n].count(text)
        )
        for n, text in enumerate(texts)
    ]


def splitmix(x):
    """SplitMix64's bijection, from its definition."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def noise_by_hand(seed, prompt_hash, sample, position, counter):
    """The keyed exponential number of a counter, in Python's integers."""
    digest = blake2b(f"{seed} {prompt_hash} {sample} {position}".encode(), digest_size=16).digest()
    a, b = (int.from_bytes(half, "little") for half in (digest[:8], digest[8:]))
    raw = splitmix(b ^ splitmix((a + counter * 0x9E3779B97F4A7C15) % 2**64))
    return -math.log1p(-((raw >> 11) + 0.5) / 2**53)


def token_by_hand(logp, seed, key):
    """The draw of one row of float64 log-probabilities: the group of 512 that wins, then the token in it."""
    parts = [logp[start : start + 512] for start in range(0, len(logp), 512)]
    scores = [logsumexp(part) - math.log(noise_by_hand(seed, *key, -1 - g)) for g, part in enumerate(parts)]
    group = int(np.argmax(scores))
    inside = range(group * 512, group * 512 + len(parts[group]))
    return max(inside, key=lambda i: logp[i] - math.log(noise_by_hand(seed, *key, i)))


def drawn_by_hand(folder, prompt, sample, sampling, ends=(1,)):
    """The same response, by reading the whole text again in float64 for each token."""
    text, response = list(prompt.token_ids), []
    while len(response) < sampling.max_new_tokens and not set(ends) & set(response):
        logp = log_softmax(double_logits(folder, text)[-1].numpy() / sampling.temperature)
        key = (prompt.prompt_hash, sample, len(response))
        response.append(token_by_hand(logp, sampling.seed, key))
        text.append(response[-1])
    return tuple(response)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_incremental_decoding_draws_as_full_forward_passes_do(folders, architecture):
    policy, _ = folders(architecture)
    model = load_pair(str(policy), str(policy)).policy
    sampling = Sampling(max_new_tokens=12, temperature=0.8, seed=3)
    for one, prompt in zip(generate(model, prompts(), sampling), prompts(), strict=True):
        assert one.response_ids == drawn_by_hand(policy, prompt, 0, sampling)
        assert one.prompt_ids == prompt.token_ids


def responses(found):
    return [one.response_ids for one in found]


def test_draws_do_not_depend_on_batches_or_order(pair):
    sampling = Sampling(max_new_tokens=20, samples_per_prompt=2)
    together = generate(pair.policy, prompts(), sampling)
    assert [(one.prompt_id, one.sample_id) for one in together] == list(product(range(4), range(2)))
    assert len(set(responses(together))) == 8
    for batch_tokens in (1, 25):
        found = generate(pair.policy, prompts(), sampling, batch_tokens=batch_tokens)
        assert responses(found) == responses(together)
    backwards = generate(pair.policy, prompts()[::-1], sampling)
    assert {one.response_ids for one in backwards} == set(responses(together))
    more = generate(pair.policy, prompts(), replace(sampling, samples_per_prompt=3))
    assert responses(more)[0:2] == responses(together)[0:2]
    other = generate(pair.policy, prompts(), replace(sampling, seed=1))
    assert not set(responses(other)) & set(responses(together))


@pytest.mark.parametrize(
    ("cut", "warpers"),
    [
        ({"temperature": 1.3}, []),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        ({"top_k": 9, "top_p": 0.8}, [TopKLogitsWarper(9), TopPLogitsWarper(0.8)]),
    ],
    ids=["whole", "min_p", "both"],
)
def test_logp_sampled_agrees_with_transformers(folders, pair, cut, warpers):
    policy, _ = folders("llama")
    sampling = Sampling(**{"max_new_tokens": 15, "temperature": 0.9, **cut})
    found = generate(pair.policy, prompts(), sampling)
    free = generate(pair.policy, prompts(), replace(sampling, top_k=None, top_p=None, min_p=None))
    assert (responses(found) != responses(free)) is bool(warpers)
    for one in found:
        z = double_logits(policy, [*one.prompt_ids, *one.response_ids])[len(one.prompt_ids) - 1 : -1]
        z = z / sampling.temperature
        rows = LogitsProcessorList(warpers)(None, z).log_softmax(-1).numpy()
        wanted = rows[np.arange(len(one.response_ids)), one.response_ids]
        assert one.logp_sampled.dtype == np.float32
        np.testing.assert_allclose(one.logp_sampled, wanted, rtol=3e-5, atol=3e-6)


def test_temperature_zero_is_greedy(folders, pair):
    policy, _ = folders("llama")
    responses = generate(pair.policy, prompts(), Sampling(max_new_tokens=10, temperature=0.0))
    for one in responses:
        rows = double_logits(policy, [*one.prompt_ids, *one.response_ids])[len(one.prompt_ids) - 1 : -1]
        assert one.response_ids == tuple(rows.argmax(-1).tolist())
        assert (one.logp_sampled == 0).all()


def test_a_response_ends_with_its_end_token(pair):
    free = generate(pair.policy, prompts(), Sampling(max_new_tokens=30, seed=1))
    assert {one.finish_reason for one in free} == {"length"}
    ends = (free[0].response_ids[4], free[2].response_ids[7])
    told = []
    ending = replace(pair.policy, eos_token_ids=ends)
    sampling = Sampling(max_new_tokens=30, seed=1)
    ended = generate(ending, prompts(), sampling, on_tokens=lambda *counts: told.append(counts))
    for whole, one in zip(free, ended, strict=True):
        stops = [place for place, token in enumerate(whole.response_ids) if token in ends]
        length = stops[0] + 1 if stops else 30
        assert one.response_ids == whole.response_ids[:length]
        np.testing.assert_allclose(one.logp_sampled, whole.logp_sampled[:length], rtol=1e-4, atol=1e-5)
        assert one.finish_reason == ("stop" if stops else "length")
    assert len({len(one.response_ids) for one in ended}) > 1
    at_most_five = generate(ending, prompts(TEXTS[:1]), replace(sampling, max_new_tokens=5))
    assert [(len(one.response_ids), one.finish_reason) for one in at_most_five] == [(5, "stop")]
    tokens, responses = zip(*told, strict=True)
    assert sum(tokens) == sum(len(one.response_ids) for one in ended)
    assert told[0] == (4, pytest.approx(4 / 30)) and sum(responses) == pytest.approx(len(ended))


@pytest.mark.parametrize("length", [125, 128])
def test_a_response_ends_at_the_context_length(pair, length):
    full = prompts((tuple(range(3, 3 + length)), (0,)))
    long, short = generate(pair.policy, full, Sampling(max_new_tokens=20))
    assert len(long.response_ids) == 128 - length + 1
    assert (long.finish_reason, len(short.response_ids)) == ("length", 20)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_one_token_per_step_is_run_with_a_cache(folders, architecture):
    policy, _ = folders(architecture)
    model = load_pair(str(policy), str(policy)).policy
    shapes = []
    handle = model.backbone.register_forward_pre_hook(
        lambda _, args, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    generate(replace(model, eos_token_ids=()), prompts(), Sampling(max_new_tokens=5))
    handle.remove()
    checks = (2, 12), (2, 13), (2, 14), (2, 16)  # of the shortest and the longest, after 0, 1, 2 and 4 steps
    assert shapes == [(4, 12), checks[0], (4, 1), checks[1], (4, 1), checks[2], (4, 1), (4, 1), checks[3]]


class Elsewhere(NamedTuple):
    """Hidden states on another device, which must be moved before they are used."""

    states: torch.Tensor

    def __getitem__(self, part):
        return Elsewhere(self.states[part])

    def to(self, device):
        return self.states.to(device)


def test_a_device_map_may_put_the_last_layer_elsewhere_than_the_head(pair):
    def moved(module, inputs, output):
        output.last_hidden_state = Elsewhere(output.last_hidden_state)
        return output

    def backbone(**inputs):
        return moved(model.backbone, inputs, model.backbone(**inputs))

    model, sampling, texts = pair.policy, Sampling(max_new_tokens=4), prompts(TEXTS[:1] * 2)
    assert extract_head(model.network, backbone, torch.arange(24)[None], "p").head.weight is not None
    wanted = generate(model, texts, sampling)
    with model.backbone.register_forward_hook(moved):
        assert responses(generate(model, texts, sampling)) == responses(wanted)


def without_a_cache(model):
    class Plain(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            assert not use_cache
            return model.backbone(input_ids=input_ids, use_cache=False)

    return replace(model, backbone=Plain())


def without_a_mask(model):
    class Blind(torch.nn.Module):
        def forward(self, input_ids, use_cache, attention_mask=None, past_key_values=None):
            return model.backbone(input_ids=input_ids, use_cache=use_cache, past_key_values=past_key_values)

    return replace(model, backbone=Blind())


def without_a_head(model):
    return replace(model, head=Head(weight=None))


@pytest.mark.parametrize("change", [without_a_cache, without_a_mask, without_a_head])
def test_a_network_that_lacks_a_cache_or_a_mask_or_a_head_draws_the_same(pair, change):
    sampling = Sampling(max_new_tokens=9)
    wanted = generate(pair.policy, prompts(), sampling)
    assert responses(generate(change(pair.policy), prompts(), sampling)) == responses(wanted)


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1] * 3], ids=["padded", "of one length"])
@pytest.mark.parametrize(("fault", "right_steps"), [("position", 0), ("position", 3), ("error", 0)])
def test_a_network_with_a_wrong_cache_is_run_without_it(folders, texts, fault, right_steps):
    """The first passes are right, and a new token is placed at the beginning of the text, or cannot be read."""
    policy, _ = folders("llama")
    model = load_pair(str(policy), str(policy)).policy
    sampling = Sampling(max_new_tokens=9)
    wanted = generate(model, prompts(texts), sampling)
    steps = []

    class WrongSteps(torch.nn.Module):
        def forward(self, position_ids=None, past_key_values=None, **inputs):
            if past_key_values is not None:
                steps.append(1)
                if fault == "error":
                    raise ValueError("the cache has another length")
                position_ids = position_ids if len(steps) <= right_steps else torch.zeros_like(position_ids)
            return model.backbone(position_ids=position_ids, past_key_values=past_key_values, **inputs)

    found = generate(replace(model, backbone=WrongSteps()), prompts(texts), sampling)
    assert responses(found) == responses(wanted)
    assert len(steps) == right_steps + 1


def test_a_recurrent_network_draws_from_its_distribution(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    config = MambaConfig(**sizes, initializer_range=0.3, eos_token_id=1)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = load_pair(str(tmp_path), str(tmp_path)).policy
    sampling = Sampling(max_new_tokens=6)
    for one, prompt in zip(generate(model, prompts(), sampling), prompts(), strict=True):
        assert one.response_ids == drawn_by_hand(tmp_path, prompt, 0, sampling)


def test_draws_follow_the_models_distribution(folders):
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


def exponentials(seed, keys, vocabulary):
    return keyed_draws.exponentials(keyed_draws.hash_keys(seed, keys), torch.arange(vocabulary))


def test_noise_is_exponential_and_depends_on_every_part_of_its_key():
    noise = exponentials(7, [("ff", 0, 0)], 20_000)
    assert noise.shape == (1, 20_000)
    assert noise.dtype == torch.float64
    assert kstest(noise[0].numpy(), "expon").pvalue > 1e-3
    keys = [("ff", 0, 0), ("fe", 0, 0), ("ff", 1, 0), ("ff", 0, 1)]
    rows = exponentials(7, keys, 1000)
    assert torch.equal(rows[0], noise[0, :1000])
    correlations = np.corrcoef(np.vstack([rows, exponentials(8, keys[:1], 1000)]))
    assert np.abs(correlations - np.eye(5)).max() < 0.15


def test_noise_has_fixed_values():
    """A change here would change what an interrupted run goes on with."""
    wanted = [noise_by_hand(2**63 + 7, "ff", 3, 2, counter) for counter in range(8)]
    np.testing.assert_allclose(exponentials(2**63 + 7, [("ff", 3, 2)], 8)[0], wanted, rtol=1e-14)
    first = exponentials(0, [("00000000000000ff", 0, 0)], 3)[0].tolist()
    assert first == pytest.approx([1.013213223559256, 1.727544540860273, 1.145378026724057], rel=1e-14)


KEYS = [(f"{number:x}", number % 3, number % 7) for number in range(40)]


@pytest.mark.parametrize("vocabulary", [3, 512, 513, 1500])
def test_a_draw_is_the_argmax_of_the_two_stages(vocabulary):
    logits = 3 * torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits[:, ::5] = -torch.inf
    logp = logits.log_softmax(-1)
    tokens, found = draw(logp, 11, KEYS)
    assert (tokens % 5 != 0).all(), "what has probability 0 is never drawn"
    rows = zip(logp.numpy(), KEYS, strict=True)
    assert tokens.tolist() == [token_by_hand(row, 11, key) for row, key in rows]
    assert torch.equal(found, logp.gather(-1, tokens[:, None])[:, 0])
    for some in ([5], [39, 0, 17]):
        assert torch.equal(draw(logp[some], 11, [KEYS[row] for row in some])[0], tokens[some])
    assert torch.equal(draw(logp.float(), 11, KEYS)[0], tokens)


@pytest.mark.parametrize("slope", [0.0, 1.0, 3.0], ids=["flat", "usual", "peaked"])
def test_rounding_changes_at_most_twice_as_many_draws_as_gumbel_max(slope):
    """Noise of the size of bfloat16 rounding; an inverse CDF would turn ten to a hundred times as many."""
    some = torch.Generator().manual_seed(int(slope))
    logits = slope * torch.randn(2048, generator=some, dtype=torch.float64)
    turned = np.zeros(2, dtype=int)
    for start in range(0, 4000, 1000):
        keys = [("b", number, 1) for number in range(start, start + 1000)]
        noise = exponentials(1, keys, 2048).log()
        moved = logits + 1.6e-2 * torch.randn(1000, 2048, generator=some, dtype=torch.float64)
        before, after = logits.log_softmax(-1).expand(1000, -1), moved.log_softmax(-1)
        turned[0] += int((draw(before, 1, keys)[0] != draw(after, 1, keys)[0]).sum())
        turned[1] += int(((before - noise).argmax(-1) != (after - noise).argmax(-1)).sum())
    assert 5 < turned[0] <= 3 * turned[1]


class Crossings(TorchFunctionMode):
    """Collects the sizes of all tensors that are asked to leave the device."""

    LEAVING = ("cpu", "numpy", "tolist", "item", "__array__", "__float__", "__bool__", "__int__")

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        places = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, str | torch.device)]
        if name in self.LEAVING or (name == "to" and places):
            self.sizes.append(args[0].numel())
        return func(*args, **kwargs)


@pytest.mark.parametrize("cut", [{}, {"top_k": 9, "top_p": 0.8, "min_p": 0.01}, {"temperature": 0.0}])
def test_no_tensor_of_vocabulary_size_leaves_the_device(pair, cut):
    with Crossings() as crossings:
        generate(pair.policy, prompts(TEXTS[:1]), Sampling(max_new_tokens=3, **cut))
    assert 0 < max(crossings.sizes) < pair.policy.vocab_size


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_nan_logits_are_an_error_with_the_prompt(folders, unhooked, temperature):
    policy, _ = folders("llama")
    model = load_pair(str(policy), str(policy)).policy
    with torch.no_grad():
        model.network.get_input_embeddings().weight[201] = torch.nan
    given = [replace(one, location=f"p.jsonl, line {one.prompt_id}") for one in prompts()]
    at = r"logits for prompt 2, sample 0 \(p.jsonl, line 2\), response token 0"
    with pytest.raises(NonFiniteError, match=f"policy gives NaN or infinite {at}"):
        generate(model, given, Sampling(temperature=temperature))


def test_batches_group_similar_lengths_within_the_budget():
    lengths = [5, 1, 9, 5, 30, 2, 9]
    batches = batch_by_length(lengths, 20)
    assert batches == [[4], [2, 6], [0, 3, 5, 1]]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[n] for n in batch) <= 20
    assert batch_by_length(lengths, 20, max_sequences=1) == [[4], [2], [6], [0], [3], [5], [1]]
    assert batch_by_length([], 20) == []
    with pytest.raises(OptionError, match="batch_tokens is 0"):
        batch_by_length(lengths, 0)
