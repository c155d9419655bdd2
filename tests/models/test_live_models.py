"""Networks in memory as models, and training that goes on as if nobody had looked."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import numpy as np
import pytest
import torch
from scoring_cases import sequence_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from kleash.auditing.targets.packages import quiet
from kleash.errors import ModelError
from kleash.models import Pair, at_rest, live_model, load_pair, pair_models, score

ANSWERS = [sequence_of((0, 40, 41), (50, 61, 72, 83))]


@pytest.fixture
def network(base):
    return AutoModelForCausalLM.from_pretrained(base)


@pytest.fixture(scope="module")
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


@pytest.fixture
def adapted(network, adapter):
    from peft import PeftModel

    with quiet():  # peft still reads attributes that transformers has renamed
        return PeftModel.from_pretrained(network, str(adapter), is_trainable=True)


def kl(policy, reference, tokenizer):
    pair = Pair(policy=policy, reference=reference, tokenizer=tokenizer)
    return score(pair, ANSWERS)["kl_policy_reference"]


def test_a_live_model_is_measured_with_its_current_weights(network, base, tokenizer):
    reference = load_pair(str(base), str(base)).reference
    with at_rest(network):
        before = kl(live_model(network, tokenizer), reference, tokenizer)
    with torch.no_grad():
        network.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with at_rest(network):
        model = live_model(network, tokenizer)
        after = kl(model, reference, tokenizer)
    assert (before == 0).all() and (after > 1e-3).all()
    assert model.path == str(base) and model.eos_token_ids == (1,) and model.context_length == 128
    assert model.head.weight.data_ptr() == network.lm_head.weight.data_ptr()


def test_notes_on_live_models_are_those_of_their_pair(network, base, tokenizer):
    copy = deepcopy(network)
    layer = copy.model.layers[0].mlp.up_proj
    layer.register_buffer("weight", layer._parameters.pop("weight").to(torch.int8))
    layer.forward = lambda hidden: hidden @ layer.weight.to(hidden).T
    network.lm_head.register_forward_hook(lambda module, inputs, logits: logits.tanh())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        policy = live_model(network.eval(), tokenizer)
    notes = pair_models(policy, live_model(copy.eval(), tokenizer, role="reference"), ()).notes
    assert notes[0].startswith("the policy (LlamaForCausalLM) does not come apart")
    assert notes[1].startswith("torch.autocast is on, so that the policy computes in torch.bfloat16; ")
    assert notes[2] == "the reference in memory runs on packed weights, with the kernels of its format"


def test_active_and_disabled_adapters_agree_with_loaded_folders(adapted, base, adapter, tokenizer):
    pair = load_pair(str(adapter), str(base))
    expected = kl(pair.policy, pair.reference, tokenizer)
    with at_rest(adapted):
        policy, base = live_model(adapted, tokenizer), live_model(adapted, tokenizer, adapter=None)
        found = kl(policy, base, tokenizer)
        adapted.merge_adapter()
        merged = kl(live_model(adapted, tokenizer), pair.reference, tokenizer)
        with pytest.raises(ModelError, match=r"an adapter is merged .* call unmerge_adapter\(\) first"):
            live_model(adapted, tokenizer, adapter=None)
    assert policy.adapter == "default" and base.adapter is None and (expected > 1e-3).all()
    np.testing.assert_allclose([found, merged], [expected, expected], rtol=1e-5)


def everything(network):
    return [module.training for module in network.modules()], [p.requires_grad for p in network.parameters()]


def test_at_rest_restores_the_training_state(adapted, tokenizer):
    with quiet():
        adapted.add_adapter("other", adapted.peft_config["default"])
    adapted.train()
    adapted.base_model.model.model.layers[1].eval()
    next(p for name, p in adapted.named_parameters() if ".default." in name).requires_grad_(False)
    before = everything(adapted)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    with pytest.raises(KeyError), at_rest(adapted):
        assert not any(module.training for module in adapted.modules())
        kl(*(live_model(adapted, tokenizer, adapter=name) for name in ("other", None)), tokenizer)
        assert adapted.active_adapter == "other"
        torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        raise KeyError
    assert everything(adapted) == before and adapted.active_adapter == "default"
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


def test_threads_are_at_rest_one_after_another(network):
    def rest(seconds):
        with at_rest(network):
            time.sleep(seconds)
            return network.training

    network.train()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rest, (0.05, 0.2))) == [False, False]
    assert network.training


def test_unsupported_live_networks_are_refused(network, adapted, tokenizer):
    network.train()
    with pytest.raises(ModelError, match="training mode"):
        live_model(network, tokenizer)
    network.eval()
    for mistaken, known in ((network, "none"), (adapted, "default")):
        with pytest.raises(ModelError, match=f"no adapter 'some' .*adapters: {known}.*leave the name"):
            live_model(mistaken, tokenizer, adapter="some")
    network.get_input_embeddings().weight.data = torch.empty(7)  # as FSDP1 flattens it
    with pytest.raises(ModelError, match="sharded over processes"):
        live_model(network, tokenizer)
