"""The whole study."""

from pathlib import Path

from kleash.auditing.study.markov import APART, markov_case
from kleash.auditing.study.measured_run import run_case
from kleash.auditing.study.normals import SHIFTS, normal_case, spread_curves
from kleash.auditing.study.positions import position_cases
from kleash.auditing.study.two_modes import two_mode_cases, two_modes
from kleash.records.study import Study
from kleash.version import __version__


def estimator_study(run: Path | None = None) -> Study:
    """Bias, standard deviation, negative values and gradient of every estimator of KL(p || q), case by case.

    By enumeration, quadrature or dynamic programming wherever that is possible, so that most numbers are
    exact; what was drawn carries its error. Takes a few seconds.

    Args:
        run: a folder of ``kleash measure``, to see the estimators on your own models too.

    Raises:
        RunFolderError: if ``run`` is no finished run.
        OptionError: if no average over its tokens estimates the KL.
    """
    measured = () if run is None else (run_case(run),)
    found = two_modes()
    cases = (
        *(normal_case(shift) for shift in SHIFTS),
        *position_cases(),
        *(markov_case(apart) for apart in APART),
        *two_mode_cases(found),
        *measured,
    )
    return Study(
        kleash=__version__,
        cases=cases,
        normals=spread_curves(),
        two_modes=found,
    )
