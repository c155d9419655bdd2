"""Prints the tables of README.md: python examples/estimator_study"""

from study import tables, two_mode_fits

if __name__ == "__main__":
    print(tables(two_mode_fits()))
