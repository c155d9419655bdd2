"""kleash inside other frameworks, one module for each; none knows another."""

__all__: list[str] = []
