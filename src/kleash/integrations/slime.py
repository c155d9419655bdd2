"""Raises ImportError: the code for slime is the recipe ``examples/recipes/slime_advantages.py``."""

raise ImportError(
    "kleash.integrations.slime is a recipe outside the package; copy examples/recipes/slime_advantages.py from the "
    "kleash repository to the Python path and set --custom-advantage-function-path to "
    "slime_advantages.leashed_advantages"
)
