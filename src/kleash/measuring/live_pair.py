"""A pair of which one model or both are networks in memory, such as a trainer's."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kleash.errors import OptionError
from kleash.models import Loading, Model, Pair, live_model, pair_models
from kleash.models.live_models import require_two_networks
from kleash.models.pair_loading import load_reference
from kleash.models.tokenizers import compare_tokenizers

REFERENCE_ADAPTER = "ref"
"""Name that TRL gives the adapter that is a PEFT model's reference."""


def require_adapter(policy: Any) -> None:
    """Check that a policy in memory has an adapter, without which its base is no reference.

    Raises:
        OptionError: if it has none.
    """
    if not hasattr(policy, "get_base_model"):
        raise OptionError(
            "the policy in memory has no adapter whose base could be the reference; give reference=, the folder "
            "or hub id that training started from or a model in memory"
        )


def live_pair(networks: Mapping[str, Any], tokenizer: Any, load: Callable[[Model], Pair] | None) -> Pair:
    """The pair of one or two networks in memory, which are at rest.

    Args:
        networks: by role, "policy" or "reference".
        tokenizer: of the networks.
        load: loads the other model beside that of the only network; None for the policy's reference in PEFT: the
            adapter "ref" if there is one, otherwise the base.

    Raises:
        ModelError: if a network cannot be measured, or the two cannot be compared.
        OptionError: if the policy has no adapter and no other reference is given, or the reference is the policy's
            network in another wrapper, such as that into which PEFT has put the policy's adapter.
    """
    models = {role: _named(live_model(network, tokenizer, role=role)) for role, network in networks.items()}
    if load is not None:
        loaded = load(*models.values())
        models = {"policy": loaded.policy, "reference": loaded.reference} | models
        return pair_models(models["policy"], models["reference"], loaded.notes)
    policy, reference = models["policy"], models.get("reference")
    if reference is None:
        require_adapter(networks["policy"])
        adapter = REFERENCE_ADAPTER if REFERENCE_ADAPTER in policy.adapters.peft_config else None
        reference = _named(live_model(networks["policy"], tokenizer, role="reference", adapter=adapter))
    elif not policy.is_same_as(reference):
        require_two_networks(networks["policy"], networks["reference"])
    return pair_models(policy, reference, ())


def load_beside_live(
    live: Model, role: str, name: str, revision: str | None = None, trust_remote_code: bool = False
) -> Pair:
    """Load the other model of a pair in the dtype and on the device of the one in memory.

    Returns:
        A pair that has it in both roles, with notes on differences between the tokenizers.

    Raises:
        ModelError: if it cannot be loaded, or the tokenizers are not interchangeable.
    """
    dtype = str(live.dtype).removeprefix("torch.")
    loading = Loading(dtype=dtype, device=str(live.device), trust_remote_code=trust_remote_code)
    loaded = load_reference(name, revision, loading, role=role)
    return replace(loaded, notes=(*loaded.notes, *compare_tokenizers(live.tokenizer, loaded.tokenizer)))


def _named(model: Model) -> Model:
    """A model in memory, with a name that is not taken for that of its files, whose weights it may not have."""
    adapter = f", adapter {model.adapter}" if model.adapter else ", without its adapters"
    return replace(model, path=f"{model.path} in memory{adapter if model.adapters is not None else ''}")
