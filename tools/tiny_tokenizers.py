"""A byte-level tokenizer for tiny random models."""

from typing import Any


def byte_tokenizer(vocab_size: int) -> Any:
    """A tokenizer of single bytes with <s>, </s> and <pad> as ids 0 to 2, and a chat template.

    Raises:
        ValueError: if the vocabulary has fewer rows than the tokenizer has tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: index for index, token in enumerate(["<s>", "</s>", "<pad>", *alphabet])}
    if len(tokens) > vocab_size:
        raise ValueError(f"{len(tokens)} tokens do not fit a vocabulary of {vocab_size}; take a larger one")
    backend = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    return tokenizer
