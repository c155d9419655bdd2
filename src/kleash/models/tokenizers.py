"""Loading tokenizers, and checking that two of them, or one and the vocabulary of a GGUF file, give the same tokens."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kleash.checkpoints.gguf.vocabulary import (
    backend_of,
    describe_differences,
    find_difference,
    read_vocabulary,
)
from kleash.checkpoints.resolution import Checkpoint, find_checkpoint, hash_tokenizer_files
from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.models.filling import loading
from kleash.sources.sequences import text_after

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
PROBES = (
    "The quick brown fox isn't quick; it jumps over 12345.678 lazy dogs.",
    "  two  spaces\n\n\ttabs, newline\r\nand a trailing space ",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # comment",
    "Ünïcödé é e\u0301 ﬁ ﬂ ½ ① straße İstanbul",
    "中文字符 日本語のテキスト 한국어 русский العربية हिन्दी 🙂👩‍👩‍👧",
    "<s></s><|endoftext|><|im_start|>user [INST] <pad>",
)
"""Texts on which two tokenizers must agree: numbers, whitespace, code, combined characters, other scripts."""
MAX_SHOWN_DIFFERENCES = 3
TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "tekken.json")
"""File patterns; every tokenizer with a vocabulary has a file of at least one."""


class TokenizerMismatchError(ModelError):
    """The tokenizers of two models give different tokens for a text."""


def compare_tokenizers(policy: Any, reference: Any) -> tuple[str, ...]:
    """Check that two tokenizers are interchangeable; return notes on differences that do not matter.

    Compares the vocabularies with added tokens, the special tokens, the merges, and the tokens of the texts in
    ``PROBES``. A normaliser or pre-tokeniser with another definition that gives these texts the same tokens is a note;
    so are a different chat template, other special tokens around a text, and a different end, padding, begin or unknown
    token (the policy's are used).

    Raises:
        TokenizerMismatchError: if they are not interchangeable, with the number of differences and the first ones.
    """
    _check_equal("tokens", policy.get_vocab(), reference.get_vocab())
    _check_equal("special tokens", _special_tokens(policy), _special_tokens(reference))
    policy_backend, reference_backend = backend_of(policy), backend_of(reference)
    _check_equal("merges", _merges(policy_backend), _merges(reference_backend))
    for text in PROBES:
        ids, other_ids = (
            list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            for tokenizer in (policy, reference)
        )
        if ids != other_ids:
            raise TokenizerMismatchError(
                f"the tokenizers have the same tokens and cut text differently: {text!r} is {ids} in the policy's and "
                f"{other_ids} in the reference's; compare models of one tokenizer"
            )
    notes = [
        *(
            f"the tokenizers' {part} are written differently, but cut {len(PROBES)} awkward texts alike"
            for part in ("normalizer", "pre_tokenizer")
            if policy_backend.get(part) != reference_backend.get(part)
        ),
        *(
            f"the policy's {kind} is {getattr(policy, kind, None)!r} and the reference's "
            f"{getattr(reference, kind, None)!r}; the policy's is used"
            for kind in NAMED_TOKENS
            if getattr(policy, kind, None) != getattr(reference, kind, None)
        ),
    ]
    around = [list(tokenizer("a", verbose=False)["input_ids"]) for tokenizer in (policy, reference)]
    if around[0] != around[1]:
        notes.append(
            f"the tokenizers put other special tokens around a text: 'a' is {around[0]} in the policy's and "
            f"{around[1]} in the reference's; the policy's are used"
        )
    if getattr(policy, "chat_template", None) != getattr(reference, "chat_template", None):
        notes.append("the chat templates differ; messages are written with the policy's for both")
    return tuple(notes)


def token_texts(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """The text of each token as it follows another, itself; part of a character becomes a replacement character.

    An id beyond the tokenizer, from the padding of a head, becomes ``<token 151700>``.
    """
    count = token_count(tokenizer)
    texts = {
        token: text_after(tokenizer, [token], [token]) if token < count else f"<token {token}>"
        for token in set(token_ids)
    }
    return [texts[token] for token in token_ids]


def token_count(tokenizer: Any, rows: int | None = None) -> int:
    """The rows that a head needs: the highest token id plus one.

    Or the ``rows`` that it has, if all tokens beyond are special ones that were added, such as the image token of Gemma
    3 in its models of text alone, and none begins, ends or pads a text.
    """
    count = max(tokenizer.get_vocab().values()) + 1
    named = {getattr(tokenizer, f"{name}_id", None) for name in NAMED_TOKENS}
    added = {
        token_id
        for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if token.special and token_id not in named
    }
    return count if rows is None or not added.issuperset(range(rows, count)) else min(rows, count)


def _check_equal(what: str, policy: dict[str, int], reference: dict[str, int]) -> None:
    """Check that two tables from tokens to ids, or from merges to ranks, are equal.

    Raises:
        TokenizerMismatchError: with the first differences.
    """
    if policy == reference:
        return
    differences = sorted(
        (key for key in policy.keys() | reference.keys() if policy.get(key) != reference.get(key)),
        key=lambda key: (min(policy.get(key, 1 << 62), reference.get(key, 1 << 62)), key),
    )
    examples = "; ".join(
        f"{key!r} is {policy.get(key, 'absent')} in the policy's and {reference.get(key, 'absent')} in the "
        "reference's"
        for key in differences[:MAX_SHOWN_DIFFERENCES]
    )
    raise TokenizerMismatchError(
        f"the tokenizers differ in {len(differences)} {what} (the policy's has {len(policy)}, the reference's "
        f"{len(reference)}): {examples}; no KL is defined between them, so compare models of one tokenizer: where a "
        "training added tokens, the reference is the model that it began with, saved with them"
    )


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    return {
        token.content: token_id
        for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if token.special
    }


def _merges(backend: dict[str, Any]) -> dict[str, int]:
    """The merges of a byte-pair encoding, with their ranks."""
    return {
        " ".join(pair): rank for rank, pair in enumerate((backend.get("model") or {}).get("merges") or [])
    }


def load_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a checkpoint: the adapter's if its folder has one, else the base's.

    Raises:
        ModelError: if there is none, or it cannot be loaded.
        ChangedInputError: if it cannot, and a file has changed since it was found.
    """
    transformers = import_extra("transformers", "models")
    folder = tokenizer_folder(checkpoint)
    # without that package transformers takes the file for one of tiktoken, and names that package alone
    advice = (
        "; a tokenizer.model of SentencePiece needs: pip install sentencepiece"
        if (folder / "tokenizer.model").is_file() and find_spec("sentencepiece") is None
        else ""
    )
    with loading(f"the tokenizer of {checkpoint}", advice, f"loaded from {folder}"):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
            ids = tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"]
            # without a file, some classes have an empty vocabulary, and those of bytes need none
            if not has_tokenizer(folder) and "a" not in tokenizer.decode(ids, skip_special_tokens=True):
                raise ValueError("it has no vocabulary")
            return tokenizer
        except Exception as error:  # tokenizers raise exceptions of every type, Exception itself included
            if has_tokenizer(folder):
                raise
            raise ModelError(
                f"{checkpoint} has no tokenizer: there is no tokenizer.json in {folder}; copy the "
                "tokenizer's files of the model it was made from into that folder"
            ) from error


def load_named_tokenizer(name: str, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a folder, which needs no weights beside it, or of a hub id.

    Raises:
        ModelError: if there is none, or it cannot be loaded.
        ChangedInputError: if it cannot, and a file has changed since it was found.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() and has_tokenizer(folder):
        checkpoint = Checkpoint(role="tokenizer", name=name, folder=folder)
        checkpoint.watch()
    else:
        checkpoint = find_checkpoint(name, role="tokenizer")
    return load_tokenizer(checkpoint, trust_remote_code)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES)


def tokenizer_folder(checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint's tokenizer."""
    if checkpoint.adapter is not None and has_tokenizer(checkpoint.adapter):
        return checkpoint.adapter
    return checkpoint.folder


def load_tokenizers(
    checkpoints: Mapping[str, Checkpoint],
    trust_remote_code: bool,
    tokenizer: str | None = None,
    stored_reference: Any = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Load the tokenizer of each role, and check that they can be compared; equal files are loaded once.

    A GGUF file has a vocabulary and no tokenizer that transformers could rebuild without changes. Its text is read
    by the tokenizer ``tokenizer`` if it is given, else by the other model's, else by one in the file's folder; this
    tokenizer must have the tokens, types and merges of the file.

    Args:
        checkpoints: by role: one, or policy and reference.
        trust_remote_code: whether Python code of the checkpoints may run.
        tokenizer: folder or hub id of a tokenizer for GGUF files.
        stored_reference: tokenizer of a reference that is not loaded.

    Returns:
        The tokenizers by role, and notes on differences that do not matter.

    Raises:
        ModelError: if there is none, or it cannot be loaded.
        ChangedInputError: if it cannot, and a file has changed since it was found.
        TokenizerMismatchError: if they are not interchangeable, with the first differences.
    """
    loaded_by_files: dict[Any, Any] = {}
    tokenizers: dict[str, Any] = {}
    notes: list[str] = []
    for role, checkpoint in checkpoints.items():
        if not checkpoint.gguf:
            with loading(f"the config.json of {checkpoint}"):  # which the tokenizer's class is chosen by, too
                import_extra("transformers", "models").AutoConfig.from_pretrained(
                    checkpoint.folder, trust_remote_code=trust_remote_code
                )
            files = (
                str(checkpoint.config.get("model_type")),
                *hash_tokenizer_files(tokenizer_folder(checkpoint)),
            )
            if files not in loaded_by_files:
                loaded_by_files[files] = load_tokenizer(checkpoint, trust_remote_code)
                notes += _describe_other_tokens(loaded_by_files[files], checkpoint)
            tokenizers[role] = loaded_by_files[files]
    if stored_reference is not None:
        tokenizers["reference"] = stored_reference
    gguf = {role: checkpoint for role, checkpoint in checkpoints.items() if checkpoint.gguf}
    readers = {f"the {role}'s tokenizer": loaded for role, loaded in tokenizers.items()}
    if gguf and tokenizer is not None:
        readers = {f"the tokenizer {tokenizer}": load_named_tokenizer(tokenizer, trust_remote_code)}
    for role, checkpoint in gguf.items():
        if not readers and not has_tokenizer(checkpoint.folder):
            raise ModelError(
                f"{checkpoint} is a GGUF file, and no other model has a tokenizer for it; give "
                "--tokenizer, the folder or hub id of the model that it was made from"
            )
        owner, loaded = (
            next(iter(readers.items()))
            if readers
            else ("the tokenizer beside it", load_tokenizer(checkpoint, trust_remote_code))
        )
        vocabulary = read_vocabulary(checkpoint.gguf_files.settings, str(checkpoint))
        difference = find_difference(vocabulary, loaded, owner)
        if difference is not None:
            raise TokenizerMismatchError(
                f"{difference}; give --tokenizer or a reference with the tokens of the file"
            )
        notes += describe_differences(vocabulary, loaded, owner)
        tokenizers[role] = loaded
    if len(tokenizers) == 2 and tokenizers["policy"] is not tokenizers["reference"]:
        notes += compare_tokenizers(tokenizers["policy"], tokenizers["reference"])
    return tokenizers, tuple(notes)


def _describe_other_tokens(tokenizer: Any, checkpoint: Checkpoint) -> tuple[str, ...]:
    """A note on a class of transformers that cuts texts otherwise than tokenizer.json in its folder says.

    Some classes keep the vocabulary of the file alone, and cut texts as the models that they were written for.
    """
    path = tokenizer_folder(checkpoint) / "tokenizer.json"
    if not path.is_file():
        return ()
    with loading(path):
        stored = import_extra("tokenizers", "models").Tokenizer.from_file(str(path))
        stored.no_padding()
    return tuple(
        f"transformers reads the tokenizer of {checkpoint} as its class {type(tokenizer).__name__}, which cuts texts "
        f"otherwise than {path} says, as {text!r}; compare with the tokens of its training, or give --responses as ids"
        # versions of transformers put a space or none before a text that begins with one, and beside special tokens
        for text in map(str.strip, PROBES[:-1])
        if list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        != stored.encode(text, add_special_tokens=False).ids
    )[:1]
