"""The result of a measurement: every number with its error, its unit and its warnings; and the verdict of a gate."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kleash.errors import RunFolderError
from kleash.estimate import Estimate
from kleash.store.checksums import read_result
from kleash.store.codec import NOT_WRITTEN
from kleash.store.statistics import KL_DIRECTIONS, KL_POLICY_REFERENCE, STATISTICS, from_fields
from kleash.store.summary import MeasuredResult

SCHEMA = 4
"""Raised when a field of a run folder is renamed or means something else; others are refused."""


EXIT_CODES = {"passed": 0, "failed": 1, "undecided": 3}
"""Verdict -> exit code of a command."""
QUANTITIES: Mapping[str, str] = {
    **{f"per_token.{name}": f"{STATISTICS[name].label} per token" for name in KL_DIRECTIONS},
    "kl_engine_trainer": "KL(engine ‖ trainer) per token",
}
"""Quantity of a gate -> its name in sentences."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict of ``--at-most`` on a quantity."""

    quantity: str
    """What is compared with the limit, a key of ``QUANTITIES``: "per_token.kl_reference_policy"."""
    at_most: float
    """The limit, in nats."""
    verdict: str
    """"passed", "failed" or "undecided"."""

    @property
    def label(self) -> str:
        """What is compared with the limit, in words."""
        return QUANTITIES.get(self.quantity, self.quantity)

    @property
    def limit(self) -> str:
        """``at_most`` with its unit, to the 15 digits that a float keeps of what was typed."""
        return f"{self.at_most:.15g} nats"

    @property
    def exit_code(self) -> int:
        """0 if passed, 1 if failed, 3 if undecided."""
        return EXIT_CODES.get(self.verdict, EXIT_CODES["undecided"])


@dataclass(frozen=True, kw_only=True)
class Gate(Verdict):
    """Whether a KL is at most the limit of ``--at-most``, with the numbers that decided it.

    ``verdict`` is "passed" if the upper end of the interval plus the noise floor is at most the limit, with at least 30
    clusters; "failed" if the lower end minus the noise floor is above it; otherwise "undecided".
    """

    value: float
    """The estimate, in nats."""
    ci95: tuple[float, float]
    """Its 95 % interval."""
    noise_floor: float | None
    """The size of rounding errors, which is added to both ends of the interval; None if it was not measured, and then
    nothing is added."""
    clusters: int
    tokens: int
    more_tokens: int | None = None
    """Of an undecided gate, about how many more tokens may decide it; None if no number of tokens is known to."""


@dataclass(frozen=True, kw_only=True)
class SweepGate(Verdict):
    """The smallest candidate of a sweep whose KL is at most the limit of ``--at-most``.

    ``verdict`` is "passed" if ``smallest`` is the smallest of all; "failed" if all candidates are above the limit;
    "undecided" if some are ``undecided``, or could not be measured.
    """

    smallest: int | None
    """Number of the candidate that takes the fewest bytes of those that passed, and of equal ones the nearest to the
    reference; None if none passed. Candidates of unknown size come last."""
    undecided: tuple[int, ...]
    """Numbers of the undecided candidates that are smaller than that, the smallest first."""


def exit_code_of(gates: Iterable[Verdict | None]) -> int:
    """The exit code for several gates, where there are any: 1 if any failed, else 3 if any is undecided, else 0."""
    codes = {gate.exit_code for gate in gates if gate is not None}
    return next((code for code in (EXIT_CODES["failed"], EXIT_CODES["undecided"]) if code in codes), 0)


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """How a model's weights are stored on disk."""

    bytes: int
    """Of all tensors, also those of an adapter."""
    bits_per_weight: float
    """Bits on disk for each weight of the network and of an adapter, with scales, offsets and what is not quantised."""
    modules: Mapping[str, str]
    """Type of each module's matrix; modules of one type that differ in the layer stand together: "blk.0-27.attn_q"."""

    @property
    def types(self) -> str:
        """The types of the matrices, that of most modules first: "bitsandbytes nf4, groups of 64 and BF16"."""
        return " and ".join(kind for kind, _ in Counter(self.modules.values()).most_common())


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """Which model it was."""

    path: str
    revision: str | None
    dtype: str
    parameters: int | None
    """None for a model behind a server, which does not say it."""
    vocabulary: int
    """Rows of the head: tokens that can have a probability."""
    fingerprint: str
    """Hash of every byte of its weights, configuration, tokenizer and adapter; without "sha256:" before it an older
    one, of samples of the weights; empty for a model in memory or behind a server."""
    weights: StoredWeights | None = None
    """How the weights are stored; None in older records, and for models in memory or behind a server."""
    base: str | None = None
    """The model that it is an adapter over; None for one that is no adapter, and in older records."""

    @property
    def storage(self) -> str:
        """How the weights are stored, in words: "an adapter over base, stored as F32", "in memory"; empty where that is
        unknown."""
        if self.weights is None:
            return "" if self.fingerprint or self.parameters is None else "in memory"
        adapter = "" if self.base is None else f"an adapter over {self.base}, "
        return f"{adapter}stored as {self.weights.types}"


def describe_storage(models: Mapping[str, ModelRecord]) -> str:
    """How the weights of policy and reference are stored, in words; empty where neither is known."""
    storages = {role: model.storage or "of unknown storage" for role, model in models.items()}
    if all(model.storage == "" for model in models.values()):
        return ""
    if len(set(storages.values())) == 1:
        return f"policy and reference {next(iter(storages.values()))}"
    return "; ".join(f"{role} {storage}" for role, storage in storages.items())


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How much was measured."""

    prompts: int
    """Prompts; on text, documents."""
    sequences: int
    """Responses; on text, windows."""
    tokens: int
    """Scored positions."""
    clusters: int
    """Groups that the errors take to be independent of each other."""
    truncated_sequences: int
    """Responses that ended because they were cut off."""
    shards: int


@dataclass(frozen=True, kw_only=True)
class SequenceTotal:
    """KL between whole responses, ``U - a (U - C)``, and the two estimates it is made of."""

    kl_policy_reference: Estimate
    control_variate_weight: float
    """The a that was fitted: 0 is the Monte Carlo sum alone, 1 the sum of the exact terms alone."""
    monte_carlo: Estimate
    """U: the mean of the summed log ratios."""
    exact_terms: Estimate
    """C: the mean of the summed exact per-token KLs."""
    largest_token: Estimate
    """The mean over responses of the largest KL(policy || reference) of a token (arXiv 2512.23075)."""


@dataclass(frozen=True, kw_only=True)
class EstimatorRecord(Estimate):
    """What a trainer's one-sample estimator says on the same tokens."""

    bias: Estimate | None
    """Estimate minus exact KL(policy || reference), paired token by token; None where the exact KL is unknown."""
    spread: float
    """Standard deviation of estimate minus exact over tokens, in nats; NaN where the exact KL is unknown."""


@dataclass(frozen=True, kw_only=True)
class Bin:
    """The tokens of one range of positions or of reference confidence."""

    low: float
    """Where the range begins (included)."""
    high: float
    """Where it ends: excluded, but for a confidence of 1."""
    tokens: int
    share_of_kl: float
    """Of the whole KL of the headline, the part that lies here."""
    kl: Estimate
    """That KL, in nats per token."""


@dataclass(frozen=True, kw_only=True)
class ConvergencePoint:
    """The running mean of the headline's KL after ``tokens`` tokens."""

    tokens: int
    mean: float
    ci95: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Drifted:
    """A token, or a whole sequence, on which the models differ most."""

    prompt_id: int
    sample_id: int
    kl: float
    """The headline's KL in nats: of the token, or summed over the sequence."""
    tokens: int = 1
    position: int | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class PromptDrift:
    """One prompt (on text: one document), over all of its samples."""

    prompt_id: int
    prompt: str
    sequences: int
    tokens: int
    kl_per_token: float
    kl_per_sequence: float
    kl_max: float
    policy_response: str | None = None
    """The beginning of the policy's first response, with --show-reference."""
    reference_response: str | None = None
    """The beginning of a response that the reference drew, with --show-reference."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Measurement(MeasuredResult):
    """How far a policy has drifted from its reference.

    >>> measurement = kleash.measure(text=["The sea was calm."], out="run")
    >>> print(measurement.per_token["kl_policy_reference"].unit)
    nats
    >>> 6 <= len(measurement.summary().splitlines()) <= 12  # print(measurement) has six
    True
    """

    views: ClassVar[str] = ".summary(), .to_pandas() and .plot()"

    schema: int = SCHEMA
    kleash: str
    """Version that measured."""
    estimand: str
    """In words: which divergence, in which direction, over whose prefixes, where, at which temperature."""
    job: Mapping[str, Any]
    source_sha256: str
    """Hash of the file of prompts, texts or responses."""
    models: Mapping[str, ModelRecord]
    device: str = ""
    """Where the models ran: "cpu", "cuda:0"; empty in files of older versions."""
    counts: Counts
    headline: str = KL_POLICY_REFERENCE
    """The KL that stands first, by its name in ``STATISTICS``, and of which ``by_position``, ``by_confidence``,
    ``top_percent_share``, ``convergence``, ``prompts`` and the worst tokens and sequences are. Older files do not say
    it."""
    per_token: Mapping[str, Estimate]
    """A mean for each column of ``tokens/``."""
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """What is unknown because one model is behind a server, by the name of the number or field, with the reason."""
    per_sequence: SequenceTotal | None
    estimators: Mapping[str, EstimatorRecord]
    estimators_note: str = ""
    """How the estimators were averaged, or why there are none."""
    quantiles: Mapping[str, Mapping[str, Estimate]]
    """For each column: "50", "75", "90", "95", "99", "99.9" and "max"."""
    by_position: tuple[Bin, ...]
    by_confidence: tuple[Bin, ...]
    """By the reference's probability of its likeliest token."""
    top1_agreement: Estimate
    """Share of positions at which both models find the same token likeliest."""
    perplexity: Mapping[str, Estimate]
    """"policy", "reference" and "ratio", on the tokens of the source."""
    probability_change: Mapping[str, Estimate]
    """"mean" and "rms" of p - q of the observed token."""
    top_percent_share: float
    """Share of the whole KL of the headline that lies in the 1 % of tokens with the most."""
    noise_floor: Estimate | None
    """The reference against itself in another batch layout: KL that is only rounding."""
    dtype_gap: Estimate | None
    """The reference in the run's dtype against itself in float32; absent where the run is in float32."""
    convergence: tuple[ConvergencePoint, ...]
    worst_tokens: tuple[Drifted, ...]
    worst_sequences: tuple[Drifted, ...]
    prompts: tuple[PromptDrift, ...]
    """The prompts with the most drift, at most 500."""
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """What was decided on the way and is worth knowing."""
    seconds: float
    finished: str
    """Date and time, UTC."""
    versions: Mapping[str, str]
    gate: Gate | None = None
    """The verdict of ``--at-most``; absent without that option."""
    folder: Path | None = field(default=None, compare=False, metadata=NOT_WRITTEN)
    """Where its files are; None if it was not read from them."""

    def __fspath__(self) -> str:
        """Its run folder, for functions that take one, such as ``kleash.compare``.

        Raises:
            RunFolderError: if it was not read from one.
        """
        if self.folder is None:
            raise RunFolderError(
                "this measurement was not read from a run folder; read it with kleash.open(folder), or give the folder"
            )
        return str(self.folder)

    @property
    def source_kind(self) -> str:
        """The option that named the source: "prompts", "text" or "responses"."""
        return next((kind for kind in ("text", "responses") if self.job.get(kind) is not None), "prompts")

    def statistics(self) -> dict[str, Estimate]:
        """Every reported statistic by its name in ``STATISTICS``: the headline or its bounds, then in that order."""
        numbers = from_fields(vars(self))
        names = (self.headline, f"{self.headline}_lower", f"{self.headline}_upper")
        return {name: numbers[name] for name in (*names, *numbers) if name in numbers}

    @classmethod
    def read(cls, folder: Path | str) -> "Measurement":
        """The measurement in a run folder.

        Raises:
            RunFolderError: if there is none, it is damaged, or a kleash with another schema wrote it.
        """
        folder = Path(folder).expanduser()
        advice = "run again with --resume to make it anew"
        missing = (
            "is it a run folder? A run that has not finished is finished by --resume; those of a sweep lie in its "
            "folder candidates"
        )
        return replace(
            read_result(cls, folder / "measurement.json", "a measurement", missing, advice), folder=folder
        )
