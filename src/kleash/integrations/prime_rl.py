"""Raises ImportError: the code for prime-rl is the recipe ``examples/recipes/prime_rl_loss.py``."""

raise ImportError(
    "kleash.integrations.prime_rl is a recipe outside the package; copy examples/recipes/prime_rl_loss.py from the "
    "kleash repository to the Python path and set import_path to prime_rl_loss.leashed_loss"
)
