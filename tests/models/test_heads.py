"""Heads: how they are found, and how it is noticed when they are not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scoring_cases import columns_by_enumeration, random_sequences
from tiny_models import CONFIGS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel

from kleash.errors import ModelError
from kleash.linear import Head
from kleash.models import load_pair, score
from kleash.models.heads import extract_head, logit_discrepancy

HEADS = {"llama": (1.0, None), "gemma2": (1.0, 3.0), "cohere": (0.25, None), "granite": (0.25, None)}


def network(architecture="llama", **config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[architecture](**config)).eval()


def probe(rows=2, length=9):
    return torch.arange(3, 3 + rows * length).reshape(rows, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("architecture", "shape"), HEADS.items())
def test_scale_and_softcap_are_read_from_the_configuration(architecture, shape, dtype):
    whole = network(architecture).to(dtype)
    anatomy = extract_head(whole, whole.base_model, probe(), "the policy")
    assert anatomy.note is None and anatomy.vocab_size == 320
    assert (anatomy.head.scale, anatomy.head.softcap) == shape
    assert anatomy.head.weight.data_ptr() == whole.get_output_embeddings().weight.data_ptr()


def test_a_bias_is_part_of_the_head():
    whole = network()
    whole.lm_head.bias = torch.nn.Parameter(torch.randn(320))
    anatomy = extract_head(whole, whole.base_model, probe(), "the policy")
    torch.testing.assert_close(anatomy.head.bias, whole.lm_head.bias.detach())


def test_multiplying_and_dividing_logits_scaling_are_distinguished():
    whole = network("granite")
    forward = whole.forward
    whole.forward = lambda **inputs: changed(forward(**inputs), lambda z: 16 * z)  # divided by 4 inside
    assert extract_head(whole, whole.base_model, probe(), "the policy").head.scale == 4.0


def changed(out, change):
    out.logits = change(out.logits)
    return out


def test_a_network_without_a_matching_head_is_measured_through_its_logits(folders):
    policy, reference = folders("llama")
    pair = load_pair(str(policy), str(reference))
    forward = pair.policy.network.forward
    pair.policy.network.forward = lambda **inputs: changed(forward(**inputs), lambda z: 1.001 * z)
    anatomy = extract_head(pair.policy.network, pair.policy.backbone, probe(), "the policy")
    assert anatomy.head.weight is None
    assert "the policy (LlamaForCausalLM) does not come apart" in anatomy.note and "slower" in anatomy.note
    through = replace(pair, policy=replace(pair.policy, head=anatomy.head, padding=None))
    sequences = random_sequences()
    found, apart = score(through, sequences), score(pair, sequences)
    hot = columns_by_enumeration(policy, reference, sequences, temperature=1 / 1.001)
    np.testing.assert_allclose(found["logp_policy"], hot["logp_policy"], rtol=3e-5)
    np.testing.assert_allclose(found["logp_reference"], apart["logp_reference"], rtol=1e-6)


@pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min, -1e9, -torch.inf])
def test_masked_logits_do_not_hide_that_the_head_gives_other_ones(mask):
    whole = network()
    forward = whole.forward

    def masked(later: float, **inputs):
        out = forward(**inputs)
        out.logits[..., :3] = mask  # as Chameleon masks the tokens of images
        out.logits[..., 3:] += later * inputs["input_ids"][:, -1:, None]
        return out

    whole.forward = lambda **inputs: masked(0.0, **inputs)
    assert extract_head(whole, whole.base_model, probe(), "the policy").head.weight is None
    whole.forward = lambda **inputs: masked(1e-3, **inputs)
    with pytest.raises(ModelError, match="lets later tokens change the logits"):
        extract_head(whole, whole.base_model, probe(), "the policy")


def test_head_rows_beyond_the_networks_logits_are_truncated():
    whole = network()
    forward = whole.forward
    whole.forward = lambda **inputs: changed(forward(**inputs), lambda z: z[..., :301])
    anatomy = extract_head(whole, whole.base_model, probe(), "the policy")
    assert (anatomy.vocab_size, anatomy.head.weight.shape) == (301, (301, 32))


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"), [(torch.float32, 3, 12), (torch.bfloat16, 3, 6), (torch.float64, 3, 12)]
)
def test_the_tolerance_is_four_units_in_the_last_place_of_the_largest_logit(dtype, right, wrong):
    head = Head(torch.eye(5, dtype=dtype))
    hidden = torch.tensor([[1.0, -8.0, 0.5, 2.0, 0.0]], dtype=dtype)
    ulp = 8 * torch.finfo(dtype).eps
    for units, agree in ((0, True), (right, True), (wrong, False)):
        own = hidden.clone()
        own[0, 1] += units * ulp
        assert (logit_discrepancy(own, hidden, head) <= 1) is agree, units


def test_another_summation_order_is_within_the_tolerance():
    """Here 1 is left of 10 000 added and taken away again: its last digits depend on when it was added."""
    hidden, head = torch.tensor([[1e4, 1.0, -1e4]]), Head(torch.ones(1, 3))
    assert logit_discrepancy(torch.tensor([[1.001]]), hidden, head) <= 1
    assert logit_discrepancy(torch.tensor([[1.1]]), hidden, head) > 1


def test_a_softcap_without_effect_on_the_probe_is_kept():
    whole = network("gemma2", final_logit_softcapping=1e4)
    assert extract_head(whole, whole.base_model, probe(), "the policy").head.softcap == 1e4


def test_non_finite_logits_agree_only_with_equal_ones():
    head = Head(torch.eye(3))
    hidden = torch.tensor([[1.0, 2.0, 3.0]])
    forbidden = Head(torch.eye(3), torch.tensor([0.0, 0.0, -torch.inf]))
    own, spoilt = torch.tensor([[1.0, 2.0, -torch.inf], [1.0, torch.nan, 3.0]])[:, None]
    assert logit_discrepancy(own, hidden, forbidden) == 0
    assert logit_discrepancy(own, hidden, head) == torch.inf
    assert logit_discrepancy(spoilt, hidden, head) == torch.inf
    assert logit_discrepancy(spoilt, spoilt, head) == torch.inf
    assert logit_discrepancy(torch.ones(1, 3), torch.ones(1, 4), head) == torch.inf
    everywhere = torch.full((1, 3), torch.nan)
    assert logit_discrepancy(everywhere, spoilt, head) == 0


def test_a_non_causal_model_is_refused():
    sizes = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=16, initializer_range=0.3)
    whole = BertLMHeadModel(config).eval()
    with pytest.raises(ModelError, match=r"the policy \(BertLMHeadModel\) lets later"):
        extract_head(whole, whole.base_model, probe(), "the policy")


class OnlyInLayers(torch.Tensor):
    """Packed weights as torchao's, which a linear layer multiplies and nothing transposes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.T.__get__:
            raise NotImplementedError
        return super().__torch_function__(func, types, args, kwargs)


def test_a_head_that_is_no_dense_matrix_is_measured_through_logits():
    whole = network()
    whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.detach().as_subclass(OnlyInLayers))
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 320))
    for head in (whole.lm_head, layers, torch.nn.Linear(32, 320, device="meta")):
        whole.get_output_embeddings = lambda head=head: head
        assert extract_head(whole, whole.base_model, probe(), "the policy").head.weight is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1.0 + 1e-6, 1.1])
def test_comparing_logits_makes_no_copy_of_the_head(monkeypatch, dtype, scale):
    """Neither where four units in the last place are enough nor where the rounding of the products is needed."""
    monkeypatch.setattr("kleash.models.heads.BLOCK_BYTES", 2**14)
    draw = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(rows, 64, generator=draw).to(dtype) for rows in (4096, 6))
    own = scale * (hidden.double() @ weight.double().T).float()
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.data_ptr() != weight.data_ptr():
                sizes.append(result.numel())
            return result

    with Sizes():
        agrees = logit_discrepancy(own, hidden, Head(weight)) <= 1
    assert agrees is (scale < 1.1)
    assert max(sizes) == own.numel() < weight.numel() / 4
