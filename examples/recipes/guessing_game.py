"""A game of several turns in TRL's GRPO with kleash's KL: the policy guesses a digit, and is told "higher" or "lower".

    LeashedGRPOTrainer(…, environment_factory=GuessingGame, kl="exact")

The prompts are messages, the chat template is one with tools. What the game says has a ``tool_mask`` of 0: TRL leaves
it out of the loss, and kleash out of the KL.
"""

from typing import Any


class GuessingGame:
    """One game; its public methods but ``reset`` and ``get_reward`` are the tools of the policy."""

    def reset(self, secret: int, **_: Any) -> None:
        """Begin with the ``secret`` of a row of the prompts."""
        self.secret, self.has_won = secret, False

    def guess(self, digit: int) -> str:
        """Guess the digit.

        Args:
            digit: from 0 to 9.

        Returns:
            "won", "higher" or "lower".
        """
        self.has_won = self.has_won or digit == self.secret
        if digit == self.secret:
            return "won"
        return "higher" if digit < self.secret else "lower"

    def get_reward(self) -> float:
        """1 for a game that was won."""
        return float(self.has_won)
