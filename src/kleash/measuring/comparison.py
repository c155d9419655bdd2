"""Paired differences between runs, from their files alone: no model, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kleash.errors import OptionError, RunFolderError
from kleash.measuring.scales import scale_of
from kleash.measuring.sequence_clusters import sequence_starts
from kleash.records import ComparedRun, Comparison, Measurement, Number, RunDifference, RunFolder
from kleash.records.checksums import damage_as_sentence
from kleash.records.comparison import COMPARED, PERPLEXITIES
from kleash.records.folder import KIND_OF_FINGERPRINT
from kleash.reports.measurement import all_warnings
from kleash.uncertainty import paired_difference
from kleash.version import __version__

SUMMED = (*COMPARED, "logp_policy", "logp_reference")
"""What is summed for each prompt."""
FEW_SHARED = 0.5
"""Share of a run's prompts below which a difference speaks for too small a part of it."""


def compare(folders: Sequence[Path | str]) -> Comparison:
    """The differences of finished runs from the first one, prompt by prompt.

    Two runs share a prompt where its token ids are the same. The difference of a mean per token is that of
    the two ratios over the shared prompts, and its error takes into account that both runs saw the same ones.

    Args:
        folders: of two or more finished runs.

    Raises:
        OptionError: if there are fewer than two.
        RunFolderError: if one is not finished or damaged, or shares no prompt with the first.
    """
    if isinstance(folders, str) or len(folders) < 2:
        given = 1 if isinstance(folders, str) else len(folders)
        raise OptionError(f"two or more run folders can be compared, not {given}; give a list of them")
    paths = [Path(folder).expanduser() for folder in folders]
    runs, names = [_read_checked(path) for path in paths], _names(paths)
    first = runs[0]
    differences = tuple(
        _difference(run, first, name, names[0]) for run, name in zip(runs[1:], names[1:], strict=True)
    )
    return Comparison(
        kleash=__version__,
        runs=tuple(_compared(run, name) for run, name in zip(runs, names, strict=True)),
        differences=differences,
        warnings=_warnings(runs, names),
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    folder: Path
    measurement: Measurement
    rows: dict[str, int]
    """Prompt hash to row."""
    sums: NDArray[np.float64]
    """Of each prompt hash: tokens, then the columns ``SUMMED``."""
    prompts: NDArray[np.int64]
    """Of each prompt hash: the prompt, or on text the document, that it belongs to."""

    @property
    def on_text(self) -> bool:
        """Whether what is paired are windows of documents."""
        return self.measurement.job.get("text") is not None

    @property
    def noun(self) -> str:
        """What is paired, in words."""
        return "documents" if self.on_text else "prompts"


def _read_checked(path: Path) -> _Run:
    with damage_as_sentence(path):
        run = _read(path)
        _compared(run, "")  # what a measurement must have to be compared
        return run


def _read(path: Path) -> _Run:
    measurement = Measurement.read(path)
    folder = RunFolder(path)
    folder.require_shards(measurement.counts.shards)
    missing = [name for name in SUMMED if name not in (*measurement.per_token, "top1_agreement")]
    if missing:
        raise RunFolderError(f"{path}/measurement.json has no {missing[0]} under per_token; measure again")
    wanted = [name for name in SUMMED if name != "top1_agreement"]
    rows: dict[str, int] = {}
    prompts: list[int] = []
    sums: list[NDArray[np.float64]] = []
    parts = folder.token_parts(["prompt_id", "sample_id", "top1_policy", "top1_reference", *wanted])
    for tokens, sequences in zip(parts, folder.sequence_parts(["prompt_id", "prompt_hash"]), strict=True):
        tokens["top1_agreement"] = tokens["top1_policy"] == tokens["top1_reference"]
        starts = sequence_starts(tokens["prompt_id"], tokens["sample_id"])
        ones = np.ones(len(tokens["prompt_id"]))
        columns = np.stack([ones, *(tokens[name].astype(np.float64) for name in SUMMED)], axis=1)
        found = zip(
            sequences["prompt_hash"], sequences["prompt_id"], np.add.reduceat(columns, starts), strict=True
        )
        for key, prompt, row in found:
            place = rows.setdefault(key, len(rows))
            if place == len(sums):
                sums.append(row)
                prompts.append(int(prompt))
            else:
                sums[place] = sums[place] + row
    return _Run(
        folder=path, measurement=measurement, rows=rows, sums=np.array(sums), prompts=np.array(prompts)
    )


def _difference(run: _Run, first: _Run, name: str, first_name: str) -> RunDifference:
    shared = [key for key in first.rows if key in run.rows]
    if not shared:
        raise RunFolderError(
            f"{run.folder} ({_count(run)} {run.noun}) and {first.folder} ({_count(first)} {first.noun}) share no "
            f"{first.noun[:-1]}; compare runs over the same ones"
        )
    here = run.sums[[run.rows[key] for key in shared]]
    there_rows = [first.rows[key] for key in shared]
    there = first.sums[there_rows]
    labels = np.unique(first.prompts[there_rows], return_inverse=True)[1]
    here, there = (_by_cluster(labels, sums) for sums in (here, there))
    differences: dict[str, Number] = {}
    for place, column in enumerate(COMPARED, start=1):
        differences[column] = Number.of(
            paired_difference(
                here[:, place],
                here[:, 0],
                there[:, place],
                there[:, 0],
                unit=scale_of(column).unit,
                **_bounds(column),
                known_value=_known_difference(run, first, column),
            )
        )
    differences |= _perplexity_differences(here, there)
    both = _count(first, there_rows)
    only_here = _count(run) - _count(run, [run.rows[key] for key in shared])
    only_there = _count(first) - both
    warnings = ()
    if len(shared) < FEW_SHARED * max(len(run.rows), len(first.rows)):
        warnings = (
            f"{name} and {first_name} share only {both} {first.noun}; {only_here} and {only_there} are in one alone",
        )
    return RunDifference(
        name=name,
        minus=first_name,
        shared_prompts=both,
        only_here=only_here,
        only_there=only_there,
        differences=differences,
        warnings=warnings,
    )


def _bounds(column: str) -> dict[str, float | None]:
    """Between what the difference of two means of a column lies, where the column has two bounds."""
    scale = scale_of(column)
    if scale.lower is None or scale.upper is None:
        return {"lower": None, "upper": None}
    return {"lower": scale.lower - scale.upper, "upper": scale.upper - scale.lower}


def _known_difference(run: _Run, first: _Run, column: str) -> float | None:
    """0 where both runs measured the same models, as far as the column depends on them; None if not."""
    roles = {"entropy_policy": ("policy",), "entropy_reference": ("reference",)}
    pairs = [
        (run.measurement.models[role], first.measurement.models[role])
        for role in roles.get(column, ("policy", "reference"))
    ]
    same = all(
        one.fingerprint and (one.fingerprint, one.dtype) == (other.fingerprint, other.dtype)
        for one, other in pairs
    )
    return 0.0 if same else None


def _count(run: _Run, rows: list[int] | None = None) -> int:
    """How many prompts these rows of a run belong to; on text, where a row is a window, documents."""
    if not run.on_text:
        return len(run.rows) if rows is None else len(rows)
    return len(np.unique(run.prompts if rows is None else run.prompts[rows]))


def _perplexity_differences(here: NDArray[np.float64], there: NDArray[np.float64]) -> dict[str, Number]:
    """Differences of perplexities, exp of a mean; their errors are those of the means, times the derivative."""
    policy, reference = (1 + SUMMED.index(name) for name in ("logp_policy", "logp_reference"))
    losses = {
        "perplexity_policy": lambda sums: -sums[:, policy],
        "perplexity_reference": lambda sums: -sums[:, reference],
        "perplexity_ratio": lambda sums: sums[:, reference] - sums[:, policy],
    }
    found: dict[str, Number] = {}
    for name in PERPLEXITIES:
        sides: list[NDArray[np.float64]] = []
        for sums in (here, there):
            loss = losses[name](sums)
            mean = loss.sum() / sums[:, 0].sum()
            with np.errstate(over="ignore", invalid="ignore"):
                # Its sum over the tokens is the perplexity, and a cluster moves it by what it moves the mean.
                sides.append(np.exp(mean) * (loss - mean * sums[:, 0] + sums[:, 0]))
        if all(np.isfinite(side).all() for side in sides):
            found[name] = Number.of(
                paired_difference(sides[0], here[:, 0], sides[1], there[:, 0], unit="none")
            )
    return found


def _by_cluster(labels: NDArray[np.int64], sums: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([np.bincount(labels, weights=column) for column in sums.T], axis=1).astype(np.float64)


def _compared(run: _Run, name: str) -> ComparedRun:
    measurement = run.measurement
    return ComparedRun(
        name=name,
        folder=str(run.folder),
        estimand=measurement.estimand,
        policy=measurement.models["policy"].path,
        reference=measurement.models["reference"].path,
        counts=measurement.counts,
        numbers={
            column: measurement.top1_agreement
            if column == "top1_agreement"
            else measurement.per_token[column]
            for column in COMPARED
        }
        | {f"perplexity_{name}": number for name, number in measurement.perplexity.items()},
        noise_floor=measurement.noise_floor,
        warnings=tuple(all_warnings(measurement)),
        source=next(
            (kind for kind in ("text", "responses") if measurement.job.get(kind) is not None), "prompts"
        ),
    )


def _names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part[-1:])} ({place})" for place, part in enumerate(parts, start=1)]


def _warnings(runs: list[_Run], names: list[str]) -> tuple[str, ...]:
    """What makes the runs different measurements and not only different policies."""
    first = runs[0].measurement
    warnings: list[str] = []
    for run, name in zip(runs[1:], names[1:], strict=True):
        other = run.measurement
        marks = [record.models["reference"].fingerprint for record in (other, first)]
        if len({mark.startswith(KIND_OF_FINGERPRINT) for mark in marks}) > 1:
            warnings.append(
                f"{name} and {names[0]} were measured by versions of kleash whose fingerprints cannot be compared, so "
                "nothing proves that their reference is the same"
            )
        elif marks[0] != marks[1]:
            warnings.append(f"{name} has another reference than {names[0]}")
        for option in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "max_new_tokens",
            "window",
            "stride",
            "dtype",
        ):
            mine, yours = other.job.get(option), first.job.get(option)
            if mine != yours:
                warnings.append(f"{name} was measured with {option} {mine}, {names[0]} with {yours}")
    return tuple(warnings)
