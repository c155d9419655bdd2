"""The estimators of KL(p || q) compared on four kinds of pairs: bias, noise, negative values and gradient.

Run it as ``python examples/estimator_study``; README.md explains the tables.
"""
