"""The vocabulary of a GGUF file, compared with a tokenizer: tokens, their types, merges and special tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kleash.errors import ModelError

NORMAL, UNUSED, BYTE = 1, 5, 6
"""Token types of llama.cpp; the others are unknown, control and user-defined."""
SPACE_LETTER = "\u0120"
NAMED_TOKENS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}
END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Settings that name tokens at which llama.cpp ends a response."""
PRE_WITH_BEGIN = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
    *("midm-2.0", "lfm2", "jina-v5-nano", "tekken", "chameleon"),
)
"""Pre-tokenizers of byte-pair encodings with which texts begin with the begin token, if the file does not say it."""
DEFAULT_BEGIN = {"llama": 1, "bert": 101, "gpt2": 11}
"""llama.cpp's begin token for files that name none, by ``tokenizer.ggml.model``."""


@dataclass(frozen=True, kw_only=True)
class GGUFVocabulary:
    """The tokens of a GGUF file."""

    subject: str
    """The model, for errors."""
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    """Empty if the file has none, as for SentencePiece."""
    scores: Sequence[float]
    """Log-probabilities of SentencePiece; empty if the file has none."""
    settings: Mapping[str, Any]
    """All settings of the file."""


def read_vocabulary(settings: Mapping[str, Any], subject: str) -> GGUFVocabulary:
    """The vocabulary in the settings of a GGUF file.

    Raises:
        ModelError: if there is none, or its lists do not belong together.
    """
    tokens = _list_of(settings, "tokens", str, subject)
    if not tokens:
        raise ModelError(
            f"{subject} has no tokenizer.ggml.tokens; convert the model again with its tokenizer"
        )
    types = _list_of(settings, "token_type", int, subject) or [NORMAL] * len(tokens)
    merges = _list_of(settings, "merges", str, subject)
    scores = _list_of(settings, "scores", float, subject)
    for name, values in (("token_type", types), ("scores", scores)):
        if values and len(values) != len(tokens):
            raise ModelError(
                f"{subject} has {len(tokens)} tokens and {len(values)} values of tokenizer.ggml.{name}; convert the "
                "model again"
            )
    return GGUFVocabulary(
        subject=subject, tokens=tokens, types=types, merges=merges, scores=scores, settings=settings
    )


def adds_begin_token(settings: Mapping[str, Any]) -> bool:
    """Whether llama.cpp puts the begin token before a text: as the file says, or as it does without a word in it.

    Source: llama.cpp, ``src/llama-vocab.cpp``, ``load``.
    """
    model, pre = settings.get("tokenizer.ggml.model"), settings.get("tokenizer.ggml.pre")
    stored = settings.get("tokenizer.ggml.add_bos_token")
    if "gemma4" in (model, pre):
        return True  # whatever the file says
    if isinstance(stored, bool):
        return stored
    return model in ("llama", "bert") or (model == "gpt2" and pre in PRE_WITH_BEGIN)


def begin_token(settings: Mapping[str, Any]) -> int | None:
    """llama.cpp's begin token of a file, whether it puts it before a text or not; None for none."""
    begin = settings.get(
        "tokenizer.ggml.bos_token_id", DEFAULT_BEGIN.get(str(settings.get("tokenizer.ggml.model")))
    )
    has_token = type(begin) is int and 0 <= begin < len(settings.get("tokenizer.ggml.tokens", ()))
    return begin if has_token else None


def puts_begin_token(tokenizer: Any) -> bool:
    """Whether a tokenizer puts its begin token before a text."""
    begin = tokenizer.bos_token_id
    return begin is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [begin]


def _list_of(settings: Mapping[str, Any], name: str, kind: type, subject: str) -> list[Any]:
    """The array ``tokenizer.ggml.<name>``; empty if it is missing."""
    values = settings.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ModelError(
            f"{subject} has a tokenizer.ggml.{name} that is no list of {kind.__name__}; convert it again"
        )
    return values


def find_difference(vocabulary: GGUFVocabulary, tokenizer: Any, owner: str) -> str | None:
    """The first difference by which a tokenizer gives a GGUF model other tokens than it was trained with.

    Compares each id's text, that special tokens are no ordinary ones in the file, and the merges with their order (of
    SentencePiece, the order of the scores). Ids that the file marks as unused may be added tokens of the tokenizer, or
    none.

    Args:
        vocabulary: of the file.
        tokenizer: a transformers tokenizer.
        owner: whose tokenizer it is: "the reference's tokenizer".
    """
    texts = {token_id: text for text, token_id in tokenizer.get_vocab().items()}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    differences: list[str] = []
    for token_id in range(max(len(vocabulary.tokens), max(texts) + 1)):
        text = texts.get(token_id)
        if token_id >= len(vocabulary.tokens):
            # a model of text alone has no rows for special tokens that its tokenizer shares with others
            if text is not None and not (token_id in added and added[token_id].special):
                differences.append(
                    f"token {token_id} is {text!r} in {owner} and beyond the {token_id} of the file"
                )
            continue
        stored, kind = vocabulary.tokens[token_id], vocabulary.types[token_id]
        if text is None:
            # A converter fills ids that no token has: [PAD151669] of the type "unused".
            if kind != UNUSED and not stored.startswith("[PAD"):
                differences.append(f"token {token_id} is {stored!r} in the file and none in {owner}")
        elif kind == UNUSED and token_id in added:
            continue  # such as a token that transformers' class of the tokenizer adds to any vocabulary
        elif not _is_same_text(stored, text, kind, token_id in added, tokenizer):
            differences.append(f"token {token_id} is {stored!r} in the file and {text!r} in {owner}")
        elif token_id in added and added[token_id].special and kind in (NORMAL, BYTE):
            name = "normal" if kind == NORMAL else "byte"
            differences.append(f"token {token_id}, {text!r}, is {name} in the file and special in {owner}")
    if not differences:
        return _different_merges(vocabulary, tokenizer, owner)
    return (
        f"{vocabulary.subject} has {len(vocabulary.tokens)} tokens, of which {len(differences)} differ from "
        f"{owner}: {'; '.join(differences[:3])}"
    )


def _is_same_text(stored: str, text: str, kind: int, is_added: bool, tokenizer: Any) -> bool:
    """Whether the text of a token in a file stands for the token ``text`` of a tokenizer."""
    if stored == text:
        return True
    if not is_added or kind in (NORMAL, BYTE):
        return False
    # Converters store added tokens as they are decoded, and user-defined ones with spaces for SentencePiece's mark.
    if stored == text.replace("\u2581", " "):
        return True
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return stored == tokenizer.decode(encoded, clean_up_tokenization_spaces=False)


def _different_merges(vocabulary: GGUFVocabulary, tokenizer: Any, owner: str) -> str | None:
    """The first difference in the merges of a byte-pair encoding, or in the order of SentencePiece's scores."""
    merges = (backend_of(tokenizer).get("model") or {}).get("merges") or []
    # gguf writes a space within a merge as the byte-level letter for it.
    pairs = [tuple(side.replace(" ", SPACE_LETTER) for side in merge) for merge in merges]
    if vocabulary.merges:
        stored = [_split_merge(merge) for merge in vocabulary.merges]
        if stored != pairs:
            place = next(
                (n for n, (a, b) in enumerate(zip(stored, pairs, strict=False)) if a != b),
                min(len(stored), len(pairs)),
            )
            sides = [" ".join(each[place]) if place < len(each) else "none" for each in (stored, pairs)]
            return (
                f"{vocabulary.subject} has {len(stored)} merges and {owner} {len(pairs)}: merge {place} is "
                f"{sides[0]!r} in the file and {sides[1]!r} in {owner}"
            )
    elif vocabulary.scores and pairs:
        ids = {text: token_id for token_id, text in enumerate(vocabulary.tokens)}
        merged_ids = [ids[a + b] for a, b in pairs if a + b in ids]
        scores = [vocabulary.scores[n] for n in merged_ids if vocabulary.types[n] == NORMAL]
        place = next((n for n in range(1, len(scores)) if scores[n] > scores[n - 1]), None)
        if place is not None:
            return f"{vocabulary.subject} merges pieces by scores in another order than {owner}, from merge {place} on"
    return None


def backend_of(tokenizer: Any) -> dict[str, Any]:
    """The settings of a fast tokenizer, as tokenizer.json has them; empty for a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {} if backend is None else json.loads(backend.to_str())


def _split_merge(merge: str) -> tuple[str, str]:
    """The two sides of a merge that is written with a space between them; a side may begin with a space."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def describe_differences(vocabulary: GGUFVocabulary, tokenizer: Any, owner: str) -> list[str]:
    """Notes on what differs and does not change the tokens of a text."""
    what = "tokens with types and merges" if vocabulary.merges else "tokens with types"
    count = len(vocabulary.tokens)
    notes = [f"{vocabulary.subject} has {count} {what} as {owner}, which reads the text"]
    for name, key in NAMED_TOKENS.items():
        stored = vocabulary.settings.get(f"tokenizer.ggml.{key}")
        other = getattr(tokenizer, f"{name}_id", None)
        # 2^32 - 1 is llama.cpp's id of no token
        if type(stored) is int and 0 <= stored < count and stored != other:
            notes.append(
                f"{vocabulary.subject} has the {name} {vocabulary.tokens[stored]!r} and {owner} "
                f"{getattr(tokenizer, name, None)!r}"
            )
    if vocabulary.settings.get("tokenizer.chat_template", tokenizer.chat_template) != tokenizer.chat_template:
        notes.append(f"{vocabulary.subject} has another chat template than {owner}, which renders messages")
    adds = puts_begin_token(tokenizer)
    if adds != adds_begin_token(vocabulary.settings):
        notes.append(
            f"{owner} {'puts the' if adds else 'puts no'} begin token before a text and llama.cpp, by the "
            f"settings of {vocabulary.subject}, {'puts none' if adds else 'puts one'}; {owner} is followed"
        )
    return notes
