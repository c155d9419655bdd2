"""Loading the tokenizers of models that are compared: a GGUF file takes that of another model with its tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kleash.errors import ModelError
from kleash.models.checkpoints.resolution import Checkpoint, find_checkpoint
from kleash.models.gguf.vocabulary import compare_with_tokenizer, read_vocabulary
from kleash.models.tokenizers import (
    TOKENIZER_FILES,
    TokenizerMismatchError,
    compare_tokenizers,
    load_tokenizer,
)


def load_tokenizers(
    checkpoints: Mapping[str, Checkpoint],
    trust_remote_code: bool,
    tokenizer: str | None = None,
    stored_reference: Any = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Load the tokenizer of each role, and check that they can be compared.

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
        TokenizerMismatchError: if they are not interchangeable, with the first differences.
    """
    tokenizers = {
        role: load_tokenizer(checkpoint, trust_remote_code)
        for role, checkpoint in checkpoints.items()
        if not checkpoint.gguf
    }
    notes: list[str] = []
    stated_tokenizer = None
    if tokenizer is not None and len(tokenizers) < len(checkpoints):
        stated_tokenizer = load_tokenizer(_find_tokenizer(tokenizer), trust_remote_code)
    if stored_reference is not None:
        tokenizers["reference"] = stored_reference
    available = dict(tokenizers)
    for role, checkpoint in checkpoints.items():
        if not checkpoint.gguf:
            continue
        if stated_tokenizer is not None:
            owner, loaded = f"the tokenizer {tokenizer}", stated_tokenizer
        elif available:
            other = next(iter(available))
            owner, loaded = f"the {other}'s tokenizer", available[other]
        else:
            owner, loaded = "the tokenizer beside it", _load_beside(checkpoint, trust_remote_code)
        notes += _compare_gguf(checkpoint, loaded, owner)
        tokenizers[role] = loaded
    if len(tokenizers) == 2:
        notes += compare_tokenizers(tokenizers["policy"], tokenizers["reference"])
    return tokenizers, tuple(notes)


def _find_tokenizer(name: str) -> Checkpoint:
    """The folder of a tokenizer; it needs no weights if it is a folder on disk."""
    folder = Path(name).expanduser()
    if folder.is_dir() and any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
        return Checkpoint(role="tokenizer", name=name, folder=folder)
    return find_checkpoint(name, role="tokenizer")


def _load_beside(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """The tokenizer in the folder of a GGUF file."""
    if not any(next(checkpoint.folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
        raise ModelError(
            f"{checkpoint} is a GGUF file, and no other model has a tokenizer for it; give "
            "--tokenizer, the folder or hub id of the model that it was made from"
        )
    return load_tokenizer(checkpoint, trust_remote_code)


def _compare_gguf(checkpoint: Checkpoint, tokenizer: Any, owner: str) -> tuple[str, ...]:
    """Check a tokenizer against the vocabulary of a GGUF file; returns notes."""
    vocabulary = read_vocabulary(checkpoint.gguf_files.settings, str(checkpoint))

    def mismatch(difference: str) -> ModelError:
        return TokenizerMismatchError(
            f"{difference}; give --tokenizer or a reference with the tokens of the file"
        )

    return compare_with_tokenizer(vocabulary, tokenizer, owner, mismatch)
