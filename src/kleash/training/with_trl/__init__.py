"""GRPO, RLOO, DPO and distillation by TRL's trainers, with kleash's KL term, beta controllers, rewards and run log."""
