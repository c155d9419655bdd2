"""Families of GGUF architectures: settings, names and layouts of each in one module."""
