"""Training on the leash: kleash's own PPO, and other people's trainers with kleash's plug-ins."""

__all__: list[str] = []
