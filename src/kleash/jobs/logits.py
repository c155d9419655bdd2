"""The job of ``kleash logits``."""

from dataclasses import dataclass
from typing import ClassVar

from kleash.errors import OptionError
from kleash.jobs.option_groups import (
    LoadingOptions,
    flag,
    is_endpoint,
    require_folder_or_hub_id,
    shown_endpoint,
)
from kleash.jobs.output_options import FORMATS, FormatOption


@dataclass(frozen=True, kw_only=True)
class LogitsJob(FormatOption, LoadingOptions):
    """Measure a model against the base logits that llama-perplexity wrote, or write such a file.

    With --policy, the file is read: the KL of the base from the policy on the file's text, with llama.cpp's statistics
    and with bounds for what 16 bits a logit leave open. With --reference and --text, the file is written, for "kleash
    logits" or for llama-perplexity --kl-divergence.
    """

    formats: ClassVar[tuple[str, ...]] = (*FORMATS, "llama.cpp")
    format: str | None = None
    """Print the result in this format instead of a summary: json; csv, a row for each number; markdown, tables for an
    issue or a page; or llama.cpp, its statistics alone. What is written has json only."""
    logits: str
    """The file, as in llama-perplexity --kl-divergence-base."""
    policy: str | None = None
    """The model to measure: a folder, a hub id, a PEFT adapter's folder, or a GGUF file."""
    revision_policy: str | None = None
    """Branch, tag or commit of the policy on the hub."""
    reference: str | None = None
    """The base whose logits are written: a folder, a hub id, a PEFT adapter's folder, or a GGUF file."""
    revision_reference: str | None = None
    """Branch, tag or commit of the reference on the hub."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer of a GGUF file; not needed where tokenizer.json is beside it."""
    text: str | None = None
    """Plain text whose logits are written, perhaps compressed (.gz, .zst), as llama.cpp reads it by -f."""
    context: int = 512
    """Tokens in a chunk when writing, as -c of llama-perplexity; the second half of each is scored."""
    limit: int | None = None
    """Read or write only so many chunks."""
    device_map: str | None = None
    """Spread the model over several devices as transformers does: auto, balanced, sequential."""

    def __post_init__(self) -> None:
        """Check types and values.

        Raises:
            OptionError: naming the option, its value and what it may be.
        """
        super().__post_init__()
        self._at_least_1("limit")
        require_folder_or_hub_id("--tokenizer", self.tokenizer)
        if self.context < 4:
            raise OptionError(f"--context must be at least 4; it is {self.context}")
        if (self.policy is None) == (self.reference is None):
            raise OptionError(
                "give --policy to measure a model against the file, or --reference with --text to write it"
            )
        if (self.text is None) != (self.reference is None):
            raise OptionError(
                "--text is what the logits of --reference are written for; give both or neither"
            )
        self.check_format()
        if self.reference is not None and self.output_format not in (None, "json"):
            raise OptionError(
                f"--format {self.format} is for numbers, and with --reference a file is written; leave it out"
            )
        if self.out is not None:
            raise OptionError(f"--out {self.out} has no use here: the result is printed, with --json as JSON")
        for name in ("policy", "reference"):
            model = getattr(self, name)
            if model is not None and is_endpoint(model):
                raise OptionError(
                    f"{flag(name)} {shown_endpoint(model)} is a server, which gives no logits; name the model itself"
                )
