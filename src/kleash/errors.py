"""What kleash raises on purpose; anything else that escapes is a bug."""


class KleashError(Exception):
    """Base of all deliberate kleash errors: one sentence that says what to do."""


class ShapeError(KleashError, ValueError):
    """Tensors whose sizes do not fit together."""


class VocabularyMismatchError(KleashError, ValueError):
    """Two models do not put probability on the same tokens."""


class NotProbabilitiesError(KleashError, ValueError):
    """Numbers that were given as probabilities and are not."""


class UnknownNameError(KleashError, ValueError):
    """A name that no table holds."""


class OptionError(KleashError, ValueError):
    """An option, or a combination of them, that means nothing."""


class DetachedError(KleashError, ValueError):
    """Something that is trained on and carries no gradient, or carries one that it must not."""


class CannotRunError(KleashError, RuntimeError):
    """An implementation that was asked for by name cannot run here."""


class MissingExtraError(KleashError, ImportError):
    """A package that an optional part of kleash needs is not installed."""


class SourceError(KleashError, ValueError):
    """Prompts, texts or responses that cannot be read as what they should be."""


class ModelError(KleashError, ValueError):
    """A model or tokenizer that cannot be loaded, taken apart or compared."""


class NonFiniteError(KleashError, ArithmeticError):
    """A model whose numbers are NaN or infinite where they must not be."""


class RunFolderError(KleashError, OSError):
    """A run folder that cannot be written, read or continued."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a sentence that says what was kept."""
