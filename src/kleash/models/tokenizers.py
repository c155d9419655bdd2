"""Loading tokenizers, and checking that two of them give every text the same tokens."""

import json
from pathlib import Path
from typing import Any

from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.models.checkpoints.resolution import Checkpoint
from kleash.models.compat import summarise_error

ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
PROBES = (
    "The quick brown fox isn't quick; it jumps over 12345.678 lazy dogs.",
    "  two  spaces\n\n\ttabs, newline\r\nand a trailing space ",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # comment",
    "Ünïcödé é e\u0301 ﬁ ﬂ ½ ① straße İstanbul",
    "中文字符 日本語のテキスト 한국어 русский العربية हिन्दी 🙂👩‍👩‍👧",
    "<s></s><|endoftext|><|im_start|>user [INST] <pad>",
)
MAX_SHOWN_DIFFERENCES = 3


class TokenizerMismatchError(ModelError):
    """The tokenizers of two models give different tokens for a text."""


def compare_tokenizers(policy: Any, reference: Any) -> tuple[str, ...]:
    """Check that two tokenizers are interchangeable; return notes on differences that do not matter.

    Compared are the vocabularies with added tokens, which tokens are special, the merges, and the tokens of a
    few awkward texts. A normaliser or pre-tokeniser that is written differently and cuts those texts alike
    is a note; so are a different chat template and different roles (the policy's are used).

    Raises:
        TokenizerMismatchError: naming the first differences and how many there are, if the two are not the same.
    """
    _check_equal("tokens", _vocabulary(policy), _vocabulary(reference))
    _check_equal("special tokens", _special(policy), _special(reference))
    ours, theirs = _backend(policy), _backend(reference)
    _check_equal("merges", _merges(ours), _merges(theirs))
    for text in PROBES:
        _check_probe(text, _encode(policy, text), _encode(reference, text))
    notes = [
        f"the tokenizers' {part} are written differently, but cut {len(PROBES)} awkward texts alike"
        for part in ("normalizer", "pre_tokenizer")
        if ours.get(part) != theirs.get(part)
    ]
    for role in ROLES:
        names = getattr(policy, role, None), getattr(reference, role, None)
        if names[0] != names[1]:
            notes.append(
                f"the policy's {role} is {names[0]!r} and the reference's {names[1]!r}; the policy's is used"
            )
    if getattr(policy, "chat_template", None) != getattr(reference, "chat_template", None):
        notes.append("the chat templates differ; messages are written with the policy's for both")
    return tuple(notes)


def token_texts(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """The text of each token by itself; a token that is part of a character shows as a replacement character.

    Rows of a padded head without a token are written as ``<token 151700>``.
    """
    count = token_count(tokenizer)
    texts = {
        token: tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if token < count
        else f"<token {token}>"
        for token in set(token_ids)
    }
    return [texts[token] for token in token_ids]


def token_count(tokenizer: Any) -> int:
    """The highest token id plus one: the rows that a head needs."""
    return max(tokenizer.get_vocab().values()) + 1


def _check_equal(what: str, ours: dict[Any, Any], theirs: dict[Any, Any]) -> None:
    if ours == theirs:
        return
    differing = sorted(
        (key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)),
        key=lambda key: (min(ours.get(key, 1 << 62), theirs.get(key, 1 << 62)), key),
    )
    shown = "; ".join(
        f"{key!r} is {ours.get(key, 'absent')} in the policy's and {theirs.get(key, 'absent')} in the "
        "reference's"
        for key in differing[:MAX_SHOWN_DIFFERENCES]
    )
    raise TokenizerMismatchError(
        f"the tokenizers differ in {len(differing)} {what} (the policy's has {len(ours)}, the reference's "
        f"{len(theirs)}): {shown}; a KL between them means nothing, so compare models of one tokenizer"
    )


def _check_probe(text: str, ours: list[int], theirs: list[int]) -> None:
    if ours != theirs:
        index = next(
            (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        raise TokenizerMismatchError(
            f"the tokenizers have the same tokens and cut text differently: {text!r} is {len(ours)} "
            f"tokens in the policy's and {len(theirs)} in the reference's, different from token {index} on; "
            "compare models of one tokenizer"
        )


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    return dict(tokenizer.get_vocab())


def _special(tokenizer: Any) -> dict[str, int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: number for number, token in added.items() if token.special}


def _backend(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {} if backend is None else json.loads(backend.to_str())


def _merges(backend: dict[str, Any]) -> dict[str, int]:
    merges = (backend.get("model") or {}).get("merges") or []
    return {" ".join(pair) if isinstance(pair, list) else pair: rank for rank, pair in enumerate(merges)}


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "tekken.json")
"""File patterns; every tokenizer has a file of at least one."""


def load_tokenizer(checkpoint: Checkpoint, role: str, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a checkpoint: the adapter's if its folder has one, else the base's.

    Raises:
        ModelError: if there is none.
    """
    transformers = import_extra("transformers", "models")
    folder = tokenizer_folder(checkpoint)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        limit = tokenizer.model_max_length
        if not isinstance(limit, int | float) or isinstance(limit, bool):
            raise ValueError(
                f"tokenizer_config.json has the model_max_length {str(limit)[:40]!r}, which is no number"
            )
        tokenizer("a", add_special_tokens=True, verbose=False)
        return tokenizer
    except Exception as error:  # tokenizers raise bare Exceptions, and every other kind
        if not any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
            raise ModelError(
                f"the {role} {checkpoint.name} has no tokenizer: there is no tokenizer.json in {folder}; copy the "
                "tokenizer's files of the model it was made from into that folder"
            ) from error
        raise ModelError(
            f"the tokenizer of the {role} {checkpoint.name} cannot be loaded from {folder}: {summarise_error(error)}"
        ) from error


def tokenizer_folder(checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint's tokenizer."""
    if checkpoint.adapter is not None and any(checkpoint.adapter.glob("tokenizer*")):
        return checkpoint.adapter
    return checkpoint.folder
