"""kleash's own PPO: rollout, reference, advantages, updates and checkpoints, on one module that anything can wrap."""

from kleash.training.ppo.training_loop import train_ppo

__all__ = ["train_ppo"]
