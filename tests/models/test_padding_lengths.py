"""Networks whose numbers depend on the longest sequence of a batch are run on sequences of one length."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scoring_cases import random_sequences
from tiny_architectures import tiny_config
from tiny_models import save_tiny, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaModel

from kleash.models import Sampling, generate, load_pair, score, tokenise_prompts
from kleash.sources.sequences import group_for_padding

SEQUENCES = random_sequences(((5, 7), (1, 30), (9, 1), (4, 8), (2, 20)))


def test_lengths_are_grouped_above_the_padded_length():
    assert group_for_padding([5, 7, 5], None) == [[0, 1, 2]]
    assert group_for_padding([5, 7, 5], 7) == [[0, 1, 2]]
    assert group_for_padding([5, 7, 5, 6], 5) == [[0, 2], [1], [3]]
    assert group_for_padding([5, 7, 5], 0) == [[0, 2], [1]]


def test_frequencies_of_long_sequences_do_not_reach_short_ones_in_a_batch(tmp_path):
    """Longrope takes other frequencies for a whole batch if its longest sequence exceeds the original length."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    config = tiny_config(
        "phi3",
        original_max_position_embeddings=24,
        rope_parameters={**rope, "original_max_position_embeddings": 24},
    )
    config.initializer_range = 0.3
    folders = [tmp_path / "policy", tmp_path / "reference"]
    networks = []
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        networks.append(AutoModelForCausalLM.from_config(config).double().eval())
        networks[-1].save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    pair = load_pair(*map(str, folders), dtype="float64")
    assert pair.policy.max_padded_length == 24
    truth = []
    for sequence in SEQUENCES:
        ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])[:, :-1]
        with torch.no_grad():
            logp, logq = (log_softmax(net(input_ids=ids).logits[0].numpy(), axis=-1) for net in networks)
        at = slice(len(sequence.prompt_ids) - 1, None)
        truth.append((np.exp(logp) * (logp - logq)).sum(-1)[at])
    truth = np.concatenate(truth)
    np.testing.assert_allclose(score(pair, SEQUENCES)["kl_policy_reference"], truth, rtol=1e-6, atol=1e-6)
    padded = replace(pair, policy=replace(pair.policy, max_padded_length=None))
    assert np.abs(score(padded, SEQUENCES)["kl_policy_reference"] - truth).max() > 1e-2
    prompts = tokenise_prompts(["The sea", "A long road leads out of the town"], pair)
    for drawn in generate(pair.policy, prompts, Sampling(max_new_tokens=30)):  # beyond the original length
        for place, token in enumerate(drawn.response_ids):
            ids = torch.tensor([[*drawn.prompt_ids, *drawn.response_ids[:place]]])
            logp = networks[0](input_ids=ids).logits[0, -1].log_softmax(-1)[token].item()
            assert drawn.logp_sampled[place] == pytest.approx(logp, abs=1e-5)


def test_a_network_that_depends_on_the_length_is_detected_and_run_without_padding(tmp_path, monkeypatch):
    forward = LlamaModel.forward

    def scaled_by_length(self, input_ids=None, **options):
        output = forward(self, input_ids=input_ids, **options)
        output.last_hidden_state = output.last_hidden_state * (1 + input_ids.shape[1] / 50)
        return output

    monkeypatch.setattr(LlamaModel, "forward", scaled_by_length)
    pair = load_pair(str(save_tiny(tmp_path / "policy", apart=0.2)), str(save_tiny(tmp_path / "reference")))
    assert pair.policy.max_padded_length == pair.reference.max_padded_length == 0
    batched, single = (score(pair, SEQUENCES, batch_tokens=n)["kl_policy_reference"] for n in (4096, 1))
    np.testing.assert_allclose(batched, single, rtol=1e-4, atol=1e-5)
    prompts = tokenise_prompts(["The sea", "A long road leads out of the town"], pair)
    policy = replace(pair.policy, eos_token_ids=())
    together = generate(policy, prompts, Sampling(max_new_tokens=4))
    apart = generate(policy, prompts, Sampling(max_new_tokens=4), batch_tokens=1)
    for one, other in zip(together, apart, strict=True):
        assert one.response_ids == other.response_ids
        np.testing.assert_allclose(one.logp_sampled, other.logp_sampled, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_other_networks_are_padded(folders, architecture):
    assert load_pair(*map(str, folders(architecture))).policy.max_padded_length is None
