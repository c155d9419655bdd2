"""What a given KL implementation, anyone's, really estimates and really differentiates."""

__all__: list[str] = []
