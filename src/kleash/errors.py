"""The exceptions that kleash raises deliberately (any other is a bug), and parts of messages: reasons, names, texts."""

import re
from collections.abc import Sequence

MAX_REASON_CHARACTERS = 300
CONTROLS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # C0 but for line break and tab, DEL, and C1
    "\\u061c\\u180e\\u200b\\u200e\\u200f\\u202a-\\u202e\\u2060-\\u206f\\ufeff"  # bidirectional and invisible
    "\\u2028\\u2029\\ufff9-\\ufffb\\U000e0000-\\U000e007f]"  # other line breaks, annotations, tags
)


class KleashError(Exception):
    """Base of all deliberate kleash errors; the message says what was wrong and what to do.

    >>> try:
    ...     kleash.kl(torch.zeros(3), torch.zeros(4))
    ... except kleash.KleashError as error:
    ...     print(error)
    logp covers 3 tokens and logq 4; pad or project one onto the other's vocabulary first
    """


class ShapeError(KleashError, ValueError):
    """Tensor shapes or dtypes that do not fit together."""


class VocabularyMismatchError(KleashError, ValueError):
    """Two distributions over different vocabularies."""


class NotProbabilitiesError(KleashError, ValueError):
    """Numbers that were passed as probabilities and are not."""


class UnknownNameError(KleashError, ValueError):
    """A name that is not in the table."""


class OptionError(KleashError, ValueError):
    """An invalid option, or an invalid combination of options."""


class DetachedError(KleashError, ValueError):
    """A tensor that needs a gradient and has none, or has one and must not."""


class CannotRunError(KleashError, RuntimeError):
    """An implementation that was requested by name and cannot run."""


class MissingExtraError(KleashError, ImportError):
    """An optional dependency that is not installed."""


class SourceError(KleashError, ValueError):
    """Prompts, texts or responses that cannot be read."""


class ModelError(KleashError, ValueError):
    """A model or tokenizer that cannot be loaded, split into trunk and head, or compared."""


class EndpointError(KleashError, OSError):
    """An inference server that cannot be reached, or whose answer cannot be used."""


class NonFiniteError(KleashError, ArithmeticError):
    """A model output that is NaN or infinite where it must not be."""


class RunFolderError(KleashError, OSError):
    """A run folder that cannot be written, read or resumed."""


class RankError(KleashError, RuntimeError):
    """A process of a run of several that failed, was lost, or differs from the first.

    ``is_reported`` is true if another rank prints the failure, so that this one need not.
    """

    def __init__(self, message: str, *, is_reported: bool = False) -> None:
        """Make the error of this sentence."""
        super().__init__(message)
        self.is_reported = is_reported


class ChangedInputError(KleashError, RuntimeError):
    """A file of a model or a source was written to while a job used it."""


class ClusterError(KleashError, RuntimeError):
    """A Ray cluster that cannot be reached or has no room, or whose workers are lost or differ from the driver."""


class TrackerWarning(UserWarning):
    """A tracker did not get a result or a step, which is on disk."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, with a message that says what was saved."""


def joined_names(names: Sequence[str]) -> str:
    """Names in a sentence: "a, b and c", "a and b", or "a" alone."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def summarise_error(error: BaseException) -> str:
    """The first informative line of an error's message, at most 300 characters and without a full stop."""
    text = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)  # whose text is the key alone
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    # A line such as "Error(s) in loading state_dict for Model:" is completed by the next one.
    last = next((index for index, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: last + 1])[:MAX_REASON_CHARACTERS].rstrip(". ")


def lacking_memory(error: BaseException) -> str:
    """What could not be allocated, in the words of Python, NumPy or torch; empty if the error is another one.

    On a CPU, torch's is a RuntimeError.
    """
    _, of_cpu, reason = str(error).rpartition("DefaultCPUAllocator: ")
    # by name, since torch may not be imported
    if not of_cpu and {"MemoryError", "OutOfMemoryError"}.isdisjoint(
        kind.__name__ for kind in type(error).__mro__
    ):
        return ""
    return reason.partition(". GPU")[0].partition("\n")[0] or "no more memory can be allocated"


def printable(text: str) -> str:
    """``text`` with control characters as JSON escapes such as ``\\u001b``, except line breaks and tabs."""
    return CONTROLS.sub(lambda match: json_escape(match.group()), text)


def on_one_line(sentence: str) -> str:
    """A sentence whose control characters and line breaks, which a name can have, are escaped."""
    return printable(sentence).replace("\n", json_escape("\n"))


def json_escape(characters: str) -> str:
    """The JSON escape of each character: ``\\u`` and four digits for each of its UTF-16 units."""
    units = characters.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n : n + 2].hex()}" for n in range(0, len(units), 2))
