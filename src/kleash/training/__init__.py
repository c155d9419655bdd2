"""Training on the leash: kleash's own PPO, and other people's trainers with kleash's plug-ins."""

from kleash.training.demonstration import demonstrate
from kleash.training.journal import Advice, Display, Journal
from kleash.training.rewards import Reward, Rewards, RewardScores, load_rewards
from kleash.training.running import train
from kleash.training.watching import Watch, distinct, repetition

__all__ = [
    "Advice",
    "Display",
    "Journal",
    "Reward",
    "RewardScores",
    "Rewards",
    "Watch",
    "demonstrate",
    "distinct",
    "load_rewards",
    "repetition",
    "train",
]
