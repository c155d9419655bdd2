"""What is trained on: losses whose value and gradient are those of the divergence they name."""

__all__: list[str] = []
