"""What is trained on: losses whose value and gradient are those of the divergence they name."""

from kleash.losses.preference import PreferenceLoss, dpo_loss, implicit_reward, response_log_ratio

__all__ = ["PreferenceLoss", "dpo_loss", "implicit_reward", "response_log_ratio"]
