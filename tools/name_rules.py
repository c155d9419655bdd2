"""The rules of ``check_names.py`` as tables: words that name nothing, old names, and what is exempt with its reason."""

from typing import NamedTuple

STOP_WORDS = frozenset(
    (
        *("found", "said", "told", "given", "asked", "kept", "held", "own", "apart"),
        *("wanted", "one", "others", "theirs", "together", "here"),
    )
)
"""Participles and pronouns that say nothing standing alone."""
NOUNS = frozenset(
    ("embedding", "encoding", "finding", "padding", "rounding", "seed", "setting", "speed", "string", "token")
)
"""Words in -ed, -en and -ing that are nouns of the field."""
FORBIDDEN_MODULES = frozenset({"common", "utils", "running"})
SHARED_ROLES = {
    "api": "a package's public functions",
    "reference": "the plain implementation that others are compared with",
    "compat": "what is patched in a framework, and the versions known",
    "base": "the interface of the implementations beside it",
}
"""Module names that several packages may have, since the module does the same for each."""


class SharedNoun(NamedTuple):
    """A module name that several packages may have, since it is the same noun in each."""

    name: str
    noun: str
    packages: tuple[str, ...]
    """The top-level packages that may have it; a module of this name elsewhere breaks the rule."""


SHARED_NOUNS = (
    SharedNoun(
        "algorithms", "the algorithms of kleash train: their jobs, and running them", ("jobs", "training")
    ),
    SharedNoun("audit", "the audit of a package: its record and its page", ("store", "reports")),
    SharedNoun("cache", "the reference cache: its job, its folder, its model", ("jobs", "store", "models")),
    SharedNoun("comparison", "a comparison of runs", ("store", "measuring", "reports")),
    SharedNoun("sweep", "a sweep over candidates", ("jobs", "store", "reports")),
    SharedNoun(
        "attribution", "an attribution of a KL to groups of weights", ("store", "measuring", "reports")
    ),
    SharedNoun("demonstration", "the demonstration", ("jobs", "store", "reports", "training")),
    SharedNoun("losses", "losses, from log-probabilities or hidden states", ("losses", "linear")),
    SharedNoun("measurement", "a measurement", ("store", "measuring", "reports")),
    SharedNoun("openrlhf", "the framework OpenRLHF", ("integrations", "auditing")),
    SharedNoun("progress", "the progress of a measurement", ("measuring", "cli")),
    SharedNoun("reference_cache", "the reference cache", ("models", "measuring")),
    SharedNoun("steps", "the steps of a training run", ("store", "cli")),
    SharedNoun("training", "the training of a model", ("training", "cli", "reports")),
    SharedNoun("trl", "the framework TRL", ("integrations", "auditing")),
    SharedNoun("verl", "the framework verl", ("integrations", "auditing")),
)
SHORTEST, LONGEST = 60, 400
"""Lines of a module below which it needs a reason, and above which it is to be looked at."""
MOST_EXEMPTIONS = 40


class OldName(NamedTuple):
    """A name that was replaced and must not come back."""

    old: str
    new: str
    kind: str = "name"
    """"module", "class", or "name": any function, argument, variable or attribute."""
    package: str = ""
    """The top-level package that it is about; all if empty."""


OLD_NAMES = (
    OldName("doubts", "warnings"),
    OldName("doubts", "warnings", "module"),
    OldName("StepWarning", "HackingAlert", "class"),
    OldName("Watcher", "ProgressReporter", "class"),
    OldName("Nobody", "NullProgressReporter", "class"),
    OldName("Sequence", "TokenSequence", "class"),
    OldName("words", "vocab_size", "name", "linear"),
    OldName("lean", "kl_fast", "module", "linear"),
    OldName("lean", "kl_fast", "name", "linear"),
    OldName("rows", "row_statistics", "module", "linear"),
    OldName("careful", "fallback", "module", "linear"),
    OldName("keeping", "forward_saved", "module", "linear"),
    OldName("pulling", "objective_grad", "module", "linear"),
    OldName("record_rows", "divergence_rows", "module", "linear"),
    OldName("room", "buffers", "name", "linear"),
    OldName("Room", "Buffers", "name", "linear"),
    OldName("ROOMS", "NUM_BUFFERS", "name", "linear"),
    OldName("Formed", "ValueAndGrad", "class", "linear"),
    OldName("Judged", "ObjectiveResult", "class", "linear"),
    OldName("across", "vocab_shards", "module", "linear"),
    OldName("across", "vocab_shards", "name", "linear"),
    OldName("Alone", "LocalVocab", "class", "linear"),
    OldName("Ranks", "ShardedVocab", "class", "linear"),
    OldName("highest", "all_reduce_max", "name", "linear"),
    OldName("added", "all_reduce_sum", "name", "linear"),
    OldName("earliest", "argmax", "name", "linear"),
    OldName("put_", "scatter_add_local_", "name", "linear"),
    OldName("met", "exchange_specs", "name", "linear"),
    OldName("ledger", "sequence_clusters", "module", "measuring"),
    OldName("tally", "cluster_sums", "module", "measuring"),
    OldName("ladder", "token_quantiles", "module", "measuring"),
    OldName("aftermath", "rescoring", "module", "measuring"),
    OldName("sides", "model_pair", "module", "measuring"),
    OldName("worst", "largest_drift", "module", "measuring"),
    OldName("scales", "units", "module", "measuring"),
    OldName("comparing", "comparison", "module", "measuring"),
    OldName("bits", "float_keys", "module", "uncertainty"),
    OldName("refining", "quantile_passes", "module", "uncertainty"),
    OldName("strays", "t_statistics", "name", "uncertainty"),
    OldName("HeldLeash", "StatefulController", "class"),
    OldName("take_up", "load_state", "name"),
    OldName("steer", "update", "name", "leash"),
    OldName("take_back_result", "unlink_result", "name"),
    OldName("Subject", "AuditedFunction", "class", "auditing"),
    OldName("subject", "function, or a noun of its own", "module", "auditing"),
    OldName("worlds", "toy_distributions", "module", "auditing"),
    OldName("situations", "inputs", "module", "auditing"),
    OldName("looker", "probe", "name", "auditing"),
    OldName("course", "scan_result", "name", "auditing"),
    OldName("Ranks", "ProcessGroup", "class", "training"),
    OldName("Trainee", "ActorCritic", "class", "training"),
    OldName("speaker", "sampler", "name", "training"),
    OldName("Said", "RewardSignals", "class", "training"),
    OldName("price", "scaled_beta", "name", "training"),
    OldName("led_to", "next_kl", "name", "training"),
    OldName("Watch", "HackingMonitor", "class"),
    OldName("Journal", "RunLog", "class"),
    OldName("Progress", "TrainingState", "class", "training"),
)


class Exemption(NamedTuple):
    """A hit that is right as it is."""

    rule: str
    """"stop-word", "old-name", "class-twice" or "module-twice"."""
    name: str
    where: str
    """The path of the file, or the folder that all hits lie in."""
    reason: str


EXEMPTIONS: tuple[Exemption, ...] = (
    Exemption(
        "class-twice",
        "KLController",
        "src/kleash/integrations",
        "stands in for a KL controller of verl or of OpenRLHF; both names are documented import paths",
    ),
    Exemption("stop-word", "kept", "src/kleash/divergences", "documented field Truncated.kept and argument"),
    Exemption("stop-word", "kept", "src/kleash/estimators", "documented argument of to_truncated"),
    Exemption("stop-word", "kept", "src/kleash/leash", "documented field TrustRegion.kept"),
    Exemption("stop-word", "apart", "src/kleash/divergences", "documented argument of MarkovModel.moved"),
)
"""At most 40; one that exempts nothing is an error."""
SHORT_MODULES: dict[str, str] = {
    "src/kleash/__main__.py": "python -m kleash",
    "src/kleash/auditing/findings/verdict.py": "orders the findings of all other modules of its package",
    "src/kleash/cli/numbers.py": "the format of numbers in the terminal, for the summary and the progress bar",
    "src/kleash/cli/verdicts.py": "the output of one command, like caching.py and training.py",
    "src/kleash/integrations/audit_target.py": "the entry point of kleash's audit target",
    "src/kleash/integrations/trainer/callback.py": "the base class of both callbacks",
    "src/kleash/integrations/trainer/compat.py": "the private interface of transformers' Trainer",
    "src/kleash/jobs/demonstration.py": "the options of one command",
    "src/kleash/launch_environment.py": "the launcher's variables, read by the command line, measuring and training",
    "src/kleash/linear/impl/onednn.py": "the matrix product that only some processors use",
    "src/kleash/measuring/progress.py": "the protocol between measuring and a display, imported by both",
    "src/kleash/measuring/token_quantiles.py": "two passes over the files of a run; all other statistics need one",
    "src/kleash/precision.py": "one rule that every floor takes its dtype from",
    "src/kleash/records.py": "a documented import path",
    "src/kleash/registry.py": "one function that every table is read by",
    "src/kleash/shipped/paths.py": "the files of the shipped pair, by name",
    "src/kleash/store/locks.py": "the lock of a folder, for store and measuring",
    "src/kleash/training/example_rewards.py": "dotted paths of rewards, which are documented and stored",
    "src/kleash/training/job_controllers.py": "the controller of a job, for PPO and TRL's trainers",
    "src/kleash/training/process_group.py": "torch.distributed, for PPO and TRL's trainers",
    "src/kleash/version.py": "the build reads the version from it",
}
"""Modules of fewer than 60 lines, with the reason why each stands alone."""
