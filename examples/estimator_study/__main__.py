"""Prints the tables of README.md: python examples/estimator_study"""

import sys
from pathlib import Path

if not __package__:  # run as a folder, which puts the folder itself on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from estimator_study.study import estimator_study, markdown

if __name__ == "__main__":
    print(markdown(estimator_study()))
