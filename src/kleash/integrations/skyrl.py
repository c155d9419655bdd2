"""Raises ImportError: the code for SkyRL is the recipe ``examples/recipes/skyrl_rewards.py``."""

raise ImportError(
    "kleash.integrations.skyrl is a recipe outside the package; copy examples/recipes/skyrl_rewards.py from the "
    "kleash repository to the Python path and import skyrl_rewards.LeashedRewards"
)
