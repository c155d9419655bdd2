"""GGUF files: reading them, their vocabulary, and a transformers network with their weights."""
