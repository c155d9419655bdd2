"""Loading one side of a pair: a reference to be cached, or a policy beside a reference that was."""

from dataclasses import replace

from kleash.models.checkpoints import find_checkpoint
from kleash.models.compat import quiet
from kleash.models.network_loading import load_tokenizer
from kleash.models.pair import Pair
from kleash.models.pair_loading import Loading, check_rows, dtype_of, fit_together, load_models, place_of
from kleash.models.stored import StoredReference
from kleash.models.tokenizers import compare_tokenizers
from kleash.records.checksums import UNCHECKED


def load_reference(name: str, revision: str | None, how: Loading) -> Pair:
    """A model as both sides of a pair: what is needed to read a source for it alone.

    Raises:
        ModelError, OptionError, CannotRunError: as ``load_pair``.
    """
    side = find_checkpoint(name, revision)
    with quiet():
        tokenizer = load_tokenizer(side, "reference", how.trust_remote_code)
        models, said = load_models({"reference": side}, {"reference": tokenizer}, how)
    taken = (f"the reference is the adapter {side.name} over {side.base}",) if side.adapter else ()
    model = models["reference"]
    check_rows(model, model.vocabulary, "logits")
    return Pair(policy=model, reference=model, tokenizer=tokenizer, notes=(*taken, *said))


def load_beside(
    stored: StoredReference,
    policy: str,
    reference: str,
    *,
    revision_policy: str | None,
    revision_reference: str | None,
    how: Loading,
) -> Pair:
    """Load a policy beside a reference that is read from its cache.

    Raises:
        ModelError: if the cache is another reference's, or the two do not put probability on the same tokens.
        OptionError, CannotRunError: as ``load_pair``.
    """
    kind = dtype_of(how.dtype, place_of(how.device, how.device_map))
    stored.check(reference, revision_reference, str(kind).removeprefix("torch."))
    side = find_checkpoint(policy, revision_policy)
    with quiet():
        ours = load_tokenizer(side, "policy", how.trust_remote_code)
        theirs = stored.tokenizer(how.trust_remote_code)
        notes = compare_tokenizers(ours, theirs)
        models, said = load_models({"policy": side}, {"policy": ours}, how)
    taken = [f"the policy is the adapter {side.name} over {side.base}"] if side.adapter else []
    taken.append(f"the reference {stored.label.reference.path} is read from {stored.folder} and not loaded")
    model = stored.model(models["policy"].device, theirs)
    pair = fit_together(models["policy"], model, (*notes, *taken, *said, *stored.contents.notes))
    if stored.checksums.exists:
        return pair
    return replace(pair, warnings=(*pair.warnings, f"{stored.folder}: {UNCHECKED}"))
