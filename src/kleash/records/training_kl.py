"""Which KL terms of a training run would train something else than what they name."""

KLS = ("exact", "k1", "k2", "k3")
KL_PLACES = ("loss", "reward")
KL_SCOPES = ("token", "sequence")


def kl_clash(kl: str, place: str, scope: str) -> str | None:
    """Why a KL term, named by its options, does not train what it names, in a sentence; None if it does.

    The reasons are those of ``kleash.losses.KLTerm``, which needs torch.
    """
    if place == "loss":
        return _in_loss(kl, scope)
    if kl == "exact" and scope == "token":
        return (
            "the exact KL as a reward is the same for every token that could have been drawn, so what it says of its "
            "own token averages to zero; take --kl-scope sequence, --kl-place loss, or --kl k1"
        )
    if kl in ("k2", "k3"):
        meant = "the gradient of KL(policy || reference)"
        return f"{kl} as a reward does not have {meant}; take --kl k1, or --kl-place loss"
    if scope == "token":
        return (
            "a KL in the reward is part of what every earlier token is paid for, which is scope sequence; "
            "take --kl-scope sequence, or --kl-place loss"
        )
    return None


def _in_loss(kl: str, scope: str) -> str | None:
    if kl == "k1":
        return (
            "k1 in the loss trains nothing when backpropagated, since its gradient averages to zero; "
            "take --kl exact, k2 or k3, or --kl-place reward"
        )
    if kl == "k2" and scope == "sequence":
        return (
            "scope sequence makes the value of k2 part of the gradient of earlier tokens, and its mean is not "
            "KL(policy || reference); take --kl exact or k3"
        )
    return None
