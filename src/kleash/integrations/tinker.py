"""Raises ImportError: the code for tinker is the recipe ``examples/recipes/tinker_loss.py``."""

raise ImportError(
    "kleash.integrations.tinker is a recipe outside the package; copy examples/recipes/tinker_loss.py from the "
    "kleash repository to the Python path and import tinker_loss.leashed_loss"
)
