"""The estimators of KL(p || q) compared on five kinds of pairs: bias, noise, negative values and gradient.

Run it as ``python examples/estimator_study``; README.md explains the tables.
"""
