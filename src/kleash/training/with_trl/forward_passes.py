"""What TRL's trainers read must be what is drawn: no dropout, and positions that do not count padding."""

import inspect
from typing import Any

import torch


def without_dropout(network: Any) -> Any:
    """Switch dropout off for good, and return the network.

    TRL trains in training mode, where the policy would be another one in every pass: not the one that answered, and
    far from a reference of the same weights. The configuration that is saved stays as it was.
    """
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):  # attention's, which is no module
                setattr(module, name, 0.0)
    return network


def positions_from_the_first_token(network: Any) -> Any:
    """Let padding on the left be no part of the positions, where that changes anything, and return the network.

    TRL pads prompts on the left and gives no positions. A rotary embedding does not mind; one that was learned, as
    GPT-2's, would read a padded prompt at other places than those where it was answered.
    """
    body = network.base_model
    if "position_ids" in inspect.signature(body.forward).parameters and _minds_padding(body):
        body.register_forward_pre_hook(_give_positions, with_kwargs=True)
    return network


def _give_positions(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    mask = named.get("attention_mask")
    if named.get("position_ids") is None and torch.is_tensor(mask) and mask.dim() == 2:
        named = {**named, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}
    return arguments, named


def _minds_padding(body: Any) -> bool:
    """Whether two tokens behind padding are read otherwise than two tokens."""
    training, device = body.training, next(body.parameters()).device
    ids = torch.tensor([[0, 1, 2]], device=device)
    mask = torch.tensor([[0, 1, 1]], device=device)
    try:
        with torch.no_grad():
            body.eval()
            padded = body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, 1:]
            alone = body(input_ids=ids[:, 1:], attention_mask=mask[:, 1:], use_cache=False).last_hidden_state
    finally:
        body.train(training)
    relative_difference = (padded.float() - alone.float()).norm() / alone.float().norm()
    return bool(relative_difference > 1e-2)  # bfloat16 rounds to 4e-3
