"""The job of ``kleash cache``."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from kleash.jobs.measure import MeasureJob
from kleash.jobs.option_groups import (
    OUTPUT_OPTIONS,
    SHIPPED_REFERENCE,
    SHIPPED_TEXT,
    ScoringOptions,
    is_endpoint,
    shown_endpoint,
)
from kleash.jobs.options import Allowed, Count, Refusal, changed_options, flag, one_of, shared_options

CHUNK_TOKENS = 512
"""Tokens in a chunk of llama-perplexity without -c."""


def _are_layers(text: str) -> bool:
    """Whether a text names layers by their numbers in ascending order, each once."""
    numbers = [int(word) if word.strip().isdecimal() else -1 for word in text.split(",")]
    return numbers[0] >= 0 and numbers == sorted(set(numbers))


Layers = Annotated[
    str, Allowed("numbers of layers in ascending order, as vLLM saves them, such as 1,2,36", _are_layers)
]


@dataclass(frozen=True, kw_only=True)
class CacheJob(ScoringOptions):
    """Run a reference once over text or responses and keep its final hidden states and its head.

    Any number of candidates are then measured against it with "kleash measure --reference-cache", which does
    not load the reference. Started again after an interruption, it goes on where it stopped. There is no
    --prompts: what a policy will answer cannot be read before it has. Without arguments: the reference and the
    text that ship with kleash.
    """

    temperature: float = 1.0
    """Temperature of the measurements to come, for which rounding is looked at; others work as well, but
    then without a noise floor."""
    batch_tokens: int = 4096
    """Tokens in a batch, padding counted; measuring with the same number gives the same bits for what occurs once."""
    limit: Count | None = None
    """Read only so many documents or responses."""
    from_hidden_states: str | None = None
    """Folder of hidden states that vLLM or SGLang saved when serving the reference; they are checked against it and
    not computed again."""
    layers: Layers | None = None
    """The engine's eagle_aux_hidden_state_layer_ids, such as 1,2,36, for hidden states of vLLM; the last is the number
    of layers of the reference."""
    format: Annotated[str, one_of(("llama.cpp",))] | None = None
    """llama.cpp writes base logits, 16 bits each, into the file --out, as llama-perplexity --kl-divergence-base does:
    of --text, plain text, in chunks of --window tokens (512 if not given), of which --limit are read. If not given,
    hidden states are written."""
    out: str | None = None
    """Folder for the cache; kleash-caches/<date-time> if not given."""

    def _refusals(self) -> Iterator[Refusal]:
        yield from (
            Refusal(
                is_endpoint(self.reference),
                f"--reference {shown_endpoint(self.reference)} is a server, which gives no hidden states; name the "
                "model itself",
            ),
            Refusal(
                self.text is None and self.responses is None and self.reference != SHIPPED_REFERENCE,
                "say what the reference should read: --text or --responses",
            ),
            Refusal(
                self.layers is not None and self.from_hidden_states is None,
                "--layers says what the files of --from-hidden-states hold; give that folder as well",
            ),
        )
        if self.format == "llama.cpp":
            unused = changed_options(self, ("responses", "stride", "from_hidden_states", "temperature"))
            yield from (
                *(
                    Refusal(True, f"{flag(name)} is not for --format llama.cpp; leave it out")
                    for name in unused
                ),
                Refusal(self.out is None, "--format llama.cpp writes one file; give its name as --out"),
                Refusal(
                    self.chunk_tokens < 4,
                    f"--window must be at least 4 for --format llama.cpp; it is {self.window}",
                ),
            )
        self.measurement()  # which refuses what a measurement does

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a chunk of base logits."""
        return CHUNK_TOKENS if self.window is None else self.window

    def measurement(self) -> MeasureJob:
        """The measurement of the reference against itself that reads what this job reads."""
        without_source = self.text is None and self.responses is None
        return MeasureJob(
            policy=self.reference,
            revision_policy=self.revision_reference,
            text=SHIPPED_TEXT if without_source else self.text,
            **shared_options(self, MeasureJob, without={"text", *OUTPUT_OPTIONS}),
        )
