"""How the weights of both sides are stored, in the estimand and in every headline."""

import numpy as np
import pytest
import torch
from packed_checkpoints import pack_gptq, save_packed
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny, tiny_adapter

from kleash.measuring import measure
from kleash.reports.text_formats import card_section, card_sentence
from kleash.store.measurement import describe_storage
from kleash.store.summary import summarize

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "checkpoint_format": "gptq"}
PACKED = "gptq int4, groups of 16 and F32"
OVER_PACKED = f"an adapter over {{packed}}, stored as {PACKED}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base, its packed copy, the packed copy's values in float32 and in bfloat16, and an adapter over the copy."""
    root = tmp_path_factory.mktemp("stored")
    base = save_tiny(root / "base")
    pack = pack_gptq(4, 16, act_order=False, version=1)
    packed = save_packed(base, root / "packed", pack, GPTQ, dense=root / "dense")
    weights = {
        name: weight.float() for name, weight in load_file(root / "dense" / "model.safetensors").items()
    }
    save_file(weights, root / "dense" / "model.safetensors", metadata={"format": "pt"})
    half = save_tiny(root / "half")
    weights = {
        name: weight.to(torch.bfloat16) for name, weight in load_file(base / "model.safetensors").items()
    }
    save_file(weights, half / "model.safetensors", metadata={"format": "pt"})
    adapter = tiny_adapter(root / "adapter", base, base_name=str(packed))
    plain = tiny_adapter(root / "plain", base)
    text = root / "text.txt"
    text.write_text("The sea was calm and the boat went out.\n\nA long road leads out of the town.\n")
    return {
        "base": base, "packed": packed, "dense": root / "dense", "half": half, "adapter": adapter, "plain": plain,
        "text": text, "root": root,
    }  # fmt: skip


def measured(models, policy, reference):
    options = {"policy": models[policy], "reference": models[reference], "text": models["text"]}
    return measure(**options, out=models["root"] / f"{policy}-{reference}", resume=True)


@pytest.mark.parametrize(
    ("policy", "reference", "storage"),
    [
        ("adapter", "packed", f"policy {OVER_PACKED}; reference stored as {PACKED}"),
        ("adapter", "base", f"policy {OVER_PACKED}; reference stored as F32"),
        ("packed", "plain", f"policy stored as {PACKED}; reference an adapter over {{base}}, stored as F32"),
        ("half", "base", "policy stored as BF16; reference stored as F32"),
    ],
)
def test_every_headline_names_how_both_sides_are_stored(models, policy, reference, storage):
    measurement = measured(models, policy, reference)
    storage = storage.format(**models)
    assert measurement.estimand.endswith(f"; {storage}")
    assert summarize(measurement).headline.endswith(f"; {storage}")
    published = storage.replace(str(models["packed"]), "packed").replace(str(models["base"]), "base")
    assert f"({published})" in card_sentence(measurement)
    assert str(models["root"]) not in card_section(measurement).split("The command")[0]


def test_the_kl_of_an_adapter_over_a_packed_base_depends_on_the_reference(models):
    """The packed base and its values in float32 are one reference; the base itself is another."""
    against_packed, against_base = (measured(models, "adapter", other) for other in ("packed", "base"))
    kls = [each.per_token["kl_policy_reference"].value for each in (against_packed, against_base)]
    exact = measured(models, "adapter", "dense").per_token["kl_policy_reference"].value
    assert kls[0] == pytest.approx(exact, rel=1e-4) and not np.isclose(*kls, rtol=0.01)


def test_what_is_not_known_is_not_said(models):
    from dataclasses import replace

    measurement = measured(models, "half", "base")
    unknown = {role: replace(model, weights=None) for role, model in measurement.models.items()}
    assert describe_storage(unknown) == ""
    half_known = {**measurement.models, "policy": unknown["policy"]}
    assert describe_storage(half_known) == "policy of unknown storage; reference stored as F32"
