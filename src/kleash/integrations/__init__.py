"""Integrations with other frameworks, a module or package for each; they do not import each other."""

__all__: list[str] = []
