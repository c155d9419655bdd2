"""The pair of small models that comes with kleash, its prompts and its text."""

from kleash.shipped.paths import SHIPPED_NAMES, shipped_folder, shipped_prompts, shipped_text

__all__ = ["SHIPPED_NAMES", "shipped_folder", "shipped_prompts", "shipped_text"]
