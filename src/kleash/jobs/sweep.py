"""The job of ``kleash sweep``."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Annotated

from kleash.jobs.cache import CacheJob
from kleash.jobs.measure import MeasureJob
from kleash.jobs.option_groups import (
    DEALING_OPTIONS,
    OUTPUT_OPTIONS,
    RANK_MAPS,
    SHIPPED_REFERENCE,
    ScoringOptions,
    WorkerOptions,
    is_endpoint,
    shown_endpoint,
)
from kleash.jobs.options import Count, Limit, Refusal, changed_options, one_of, shared_options
from kleash.jobs.output_options import (
    DIRECTION_OF_SWEEPS,
    DIRECTIONS,
    Direction,
    FormatOption,
    TrackerOption,
)
from kleash.store.codec import encode

MAX_SLUG = 40
"""Characters of a candidate's name in the name of its folder."""


@dataclass(frozen=True, kw_only=True)
class SweepJob(FormatOption, TrackerOption, ScoringOptions, WorkerOptions):
    """Measure several candidates, such as quantisations of one model, against one reference, and rank them with ties.

    The reference is run once, into a cache in --out; then each candidate is measured in one pass. The page shows the
    KL of each against its size, and which differences are larger than the noise of the sample.
    """

    candidates: tuple[str, ...] = ()
    """Models to measure, each as --policy of "kleash measure"."""
    temperature: float = 1.0
    """Divides the logits of all models."""
    limit: Count | None = None
    """Read only so many documents or responses."""
    direction: Direction = DIRECTION_OF_SWEEPS
    """The KL per token that ranks the candidates, is attributed, and is limited by --at-most: reference-policy, which
    llama.cpp calls the KLD of a quantisation, averages over the reference's next tokens, policy-reference over the
    candidate's."""
    at_most: Limit | None = None
    """A limit in nats: which candidate is the smallest on disk whose KL is at most that, by its interval and its noise
    floor as in "kleash measure --at-most". Exit code 0 if one is, 1 if none is, 3 if a smaller one is undecided."""
    attribute: tuple[Annotated[str, one_of(("layers", "modules"))], ...] = ()
    """After the ranking, swap groups of each candidate's weights back to the reference's, one at a time, and measure
    again: layers is a group per decoder layer, modules one per kind of module over all layers. Takes both models in
    memory and a forward pass for each group."""
    attribute_tokens: Count = 20_000
    """Tokens of the source on which groups are swapped, in sequences drawn at random."""
    resume: bool = False
    """Go on with a sweep in --out: finished candidates are kept, and others may be added at the end of
    --candidates."""
    out: str | None = None
    """Folder for the results; kleash-sweeps/<date-time> if not given."""

    def _refusals(self) -> Iterator[Refusal]:
        servers = map(shown_endpoint, filter(is_endpoint, self.candidates))
        yield from (
            Refusal(not self.candidates, "name the models to measure: --candidates q8/ q4/ ..."),
            *(
                Refusal(
                    self.candidates.count(name) > 1,
                    f"--candidates names {name} twice; a model is measured once",
                )
                for name in self.candidates
            ),
            *(
                Refusal(
                    True,
                    f"the candidate {address} is a server, which allows bounds and no exact KL; measure it alone with "
                    f"kleash measure --policy {address}",
                )
                for address in servers
            ),
            Refusal(
                self.text is None and self.responses is None and self.reference != SHIPPED_REFERENCE,
                "say what the models should read: --text or --responses",
            ),
            *(
                Refusal(self.attribute.count(word) > 1, f"--attribute names {word} twice; name it once")
                for word in self.attribute
            ),
            Refusal(
                not self.attribute and changed_options(self, ["attribute_tokens"]),
                "--attribute-tokens is for --attribute; add that, or leave it out",
            ),
            Refusal(
                self.attribute and self.engine != "local",
                f"--attribute swaps weights in this process, and with --engine {self.engine} the models are in the "
                "workers; sweep first, and then attribute with --resume and without --engine",
            ),
            Refusal(
                self.attribute and self.device_map in RANK_MAPS,
                f"--attribute swaps whole modules, which --device-map {self.device_map} divides over processes; leave "
                "one of them out",
            ),
        )
        self.cache_job(Path())
        self.measure_job(1, Path())

    @property
    def statistic(self) -> str:
        """The name in ``STATISTICS`` of the KL of ``direction``."""
        return DIRECTIONS[self.direction]

    def settings(self) -> dict[str, object]:
        """The fields that decide the result, ready for JSON, as those of a measurement."""
        return {
            option.name: encode(getattr(self, option.name))
            for option in fields(self)
            if option.name not in OUTPUT_OPTIONS | DEALING_OPTIONS
        }

    def cache_job(self, out: Path) -> CacheJob:
        """The job that runs the reference once, into ``reference-cache`` of the sweep's folder."""
        return CacheJob(
            **shared_options(self, CacheJob, without=OUTPUT_OPTIONS), out=str(out / "reference-cache")
        )

    def measure_job(self, number: int, out: Path) -> MeasureJob:
        """The job that measures the candidate ``number``, counted from 1, into its folder of the sweep."""
        cache_job = self.cache_job(out)
        return replace(
            cache_job.measurement(),
            **shared_options(self, WorkerOptions),
            policy=self.candidates[number - 1],
            revision_policy=None,
            reference_cache=cache_job.out,
            out=str(out / self.folder_of(number)),
        )

    def folder_of(self, number: int) -> PurePath:
        """The folder of the candidate ``number``, within that of the sweep."""
        return PurePath("candidates") / f"{number:02d}-{slug(self.candidates[number - 1])}"


def slug(name: str) -> str:
    """The last part of a model's name, in lower case, with hyphens in place of all but letters and digits."""
    last = re.split(r"[/\\:]", name.rstrip("/\\"))[-1].lower()
    words = re.sub(r"[^a-z0-9.]+", "-", last.removesuffix(".gguf")).strip("-.")
    return words[:MAX_SLUG].rstrip("-.") or "model"
