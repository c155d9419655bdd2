"""The study: what every sampled estimator of a KL gets right, and how noisily."""

from kleash.auditing.study.whole import estimator_study

__all__ = ["estimator_study"]
