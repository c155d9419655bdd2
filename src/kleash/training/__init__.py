"""Training with a KL term: kleash's PPO, and TRL's trainers with kleash's plug-ins."""

from kleash.training.algorithms import train
from kleash.training.attaching import attach
from kleash.training.hacking_monitor import HackingMonitor, distinct, repetition
from kleash.training.rewards import Reward, Rewards, load_rewards
from kleash.training.run_log import Advice, Display, RunLog

__all__ = [
    "Advice",
    "Display",
    "HackingMonitor",
    "Reward",
    "Rewards",
    "RunLog",
    "attach",
    "distinct",
    "load_rewards",
    "repetition",
    "train",
]
