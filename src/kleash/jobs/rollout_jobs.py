"""The jobs that read rollouts with log-probabilities of trainer and engine: ``mismatch``."""

from dataclasses import dataclass

from kleash.jobs.option_groups import require_limit, require_word

METRIC_NAMES = ("verl",)
"""Systems whose names for the statistics of a mismatch are known."""


@dataclass(frozen=True, kw_only=True)
class MismatchJob:
    """Measure the mismatch between a trainer's log-probabilities and those of the engine that drew the tokens.

    The file has a record for each response, with "prompt_token_ids", "response_token_ids", "trainer_logprobs" and
    "engine_logprobs", and perhaps "response_mask"; verl's, TRL's and prime-rl's names are understood.
    """

    rollouts: str
    """File of rollouts: JSONL, a JSON array or Parquet; - is standard input."""
    names: str | None = None
    """Print the metrics under the names and definitions of a framework instead: verl."""
    at_most: float | None = None
    """A limit in nats for KL(engine || trainer) per token. Exit code 0 if the upper end of its interval is not above
    the limit, 1 if the lower end is, otherwise 3, and how many more tokens would decide. Never 0 below 30 prompts."""
    json: bool = False
    """Print the numbers as JSON instead of a table."""

    def __post_init__(self) -> None:
        """Check the limit and the names; raises OptionError."""
        require_limit(self.at_most)
        if self.names is not None:
            require_word("--names", self.names, METRIC_NAMES)
