"""The version of kleash."""

__version__ = "0.1.0"
