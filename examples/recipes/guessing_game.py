"""A game of several turns in TRL's GRPO with kleash's KL: the policy guesses a digit, and is told "higher" or "lower".

    LeashedGRPOTrainer(…, rollout_func=play, reward_funcs=[won], kl="exact")

``env_mask`` is 0 for what the game says: TRL leaves these tokens out of the loss, and kleash out of the KL.
"""

from typing import Any

import torch

TURNS, TOKENS = 3, 6


def play(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A game for each prompt, as TRL's ``rollout_func``."""
    games = [game(prompt, trainer) for prompt in prompts]
    return {"logprobs": None, **{name: [each[name] for each in games] for name in games[0]}}


@torch.no_grad()
def game(prompt: str, trainer: Any) -> dict[str, Any]:
    """One game: the tokens of prompt and response, which of them the policy chose, and whether it won."""
    tokenizer, network = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    secret, prompt_ids = len(prompt) % 10, tokenizer(prompt)["input_ids"]
    response, mask, has_won = [], [], False
    sampling = {"do_sample": True, "temperature": trainer.temperature, "top_k": 0, "max_new_tokens": TOKENS}
    for _ in range(TURNS):
        ids = torch.tensor([prompt_ids + response], device=network.device)
        guess = network.generate(ids, **sampling)[0, ids.shape[1] :].tolist()
        digits = [int(letter) for letter in tokenizer.decode(guess) if letter in "0123456789"]
        has_won = digits[:1] == [secret]
        word = " won" if has_won else " higher" if digits and digits[0] < secret else " lower"
        reply = tokenizer(word)["input_ids"]
        response, mask = [*response, *guess, *reply], [*mask, *[1] * len(guess), *[0] * len(reply)]
        if has_won:
            break
    return {"prompt_ids": prompt_ids, "completion_ids": response, "env_mask": mask, "won_game": has_won}


def won(completions: list[str], won_game: list[bool], **_: Any) -> list[float]:
    """1 for a game that was won, and a little for each digit that was said."""
    return [
        float(each) + 0.1 * any(map(str.isdigit, text))
        for each, text in zip(won_game, completions, strict=True)
    ]
