"""What GRPO and RLOO have in common: the KL term beside TRL's own loss."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.arguments import check_reward_order
from kleash.errors import OptionError
from kleash.estimators import importance_weights
from kleash.estimators.weights import ImportanceWeights
from kleash.integrations.trl.catching import Catching
from kleash.integrations.trl.drawing import note_what_does_nothing, require_own_samples
from kleash.integrations.trl.passes import Pass
from kleash.integrations.trl.terms import KLOptions, Window
from kleash.kl_rules import default_scope
from kleash.linear import LinearOptions, linear_kl_loss
from kleash.losses import future_kl_loss

REFERENCE_HIDDEN = "kleash_reference_hidden"
REFERENCE_LOGP = "ref_per_token_logps"
BEHAVIOUR = "kleash_behaviour_logps"


@dataclass(frozen=True, eq=False, kw_only=True)
class Share:
    """The KL of a micro-batch."""

    loss: Float[Tensor, ""]
    """What it adds to the loss of the update, but for beta."""
    per_token: Float[Tensor, "batch time"]
    """Its value at each token, weighted as it is trained; 0 where masked."""
    effective: float | None = None
    """Tokens that the importance weights leave, as a share of all; None without weights."""


def ordered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function of TRL's that raises where its numbers are in no order of the responses; models as they are.

    Raises:
        CannotRunError: when it is called and returns a mapping, a set or text.
    """
    if isinstance(function, torch.nn.Module):
        return function

    def checked(returned: Any) -> Any:
        check_reward_order(name, returned)
        return returned

    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(inner.__call__):

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return checked(await function(*args, **kwargs))

        return awaited
    return lambda *args, **kwargs: checked(function(*args, **kwargs))


class OwnKL(Catching):
    """In front of one of TRL's trainers: takes over its KL.

    ``kl`` "exact", "k1", "k2" or "k3"; ``kl_place`` "loss" or "reward"; ``kl_scope`` "token" (default in a loss) or
    "sequence" (default in a reward);
    ``kl_gradient`` and ``kl_cap`` as the fields of ``kleash.losses.KLTerm``. A combination that trains something
    else than KL(policy || reference) raises OptionError and says what. ``reference`` is a model in memory that the
    policy is kept near, in the place of the one that TRL would load: the checkpoint that the policy came from.
    """

    _metrics: Any
    reward_funcs: list[Any]
    reward_func_names: list[str]

    # More arguments than elsewhere: they are options of a trainer, all by name, before those of TRL's own.
    def __init__(
        self,
        *args: Any,
        kl: str = "exact",
        kl_place: str = "loss",
        kl_scope: str | None = None,
        kl_gradient: str | None = None,
        kl_cap: float | None = None,
        linear_options: LinearOptions | None = None,
        **kwargs: Any,
    ) -> None:
        """Make TRL's trainer, which is given everything else, and see that its KL makes sense."""
        super().__init__(*args, **kwargs)
        self._linear = linear_options
        self._kl_options = KLOptions(
            kl=kl,
            place=kl_place,
            scope=default_scope(kl_place) if kl_scope is None else kl_scope,
            gradient=kl_gradient,
            cap=kl_cap,
            loss_type=self._loss_type,
            length=self.args.max_completion_length,
        )
        self._term = self._kl_options.term(off_policy=self._off_policy)
        require_own_samples(self._kl_options, self)
        note_what_does_nothing(self._kl_options, self)
        if self.beta != 0 and self._kl_options.exact:
            self._readings()

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        """TRL's; a reward function that returns a dict is refused, whose keys TRL would take for the rewards."""
        parent: Any = super()
        functions = self.reward_funcs
        names = self.reward_func_names
        self.reward_funcs = [ordered(name, each) for name, each in zip(names, functions, strict=True)]
        try:
            return parent._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = functions

    @property
    def _loss_type(self) -> str:
        """How the policy term is averaged, by a name of ``LOSS_TYPES``."""
        return "rloo"

    @property
    def _off_policy(self) -> bool:
        """Whether some updates are made with samples of an older policy."""
        every = self.args.steps_per_generation * self.args.num_iterations
        return self.args.gradient_accumulation_steps % every != 0

    def _share(self, policy_pass: Pass, inputs: dict[str, Any], window: Window) -> Share:
        """The KL of a micro-batch, from the policy's pass and what was kept of the reference's."""
        mask = self._counted(inputs)
        shares = self._kl_options.share(mask, window)
        behaviour, ratio, effective = None, None, None
        if self._term.ratio != "none":
            behaviour = self._behaviour(inputs)
            behaviour = policy_pass.logp.detach() if behaviour is None else behaviour
            level, cap = self._term.ratio, self._term.cap
            ratio = importance_weights(policy_pass.logp, behaviour, mask, level=level, cap=cap)
            effective = float(ratio.effective_sample_size / mask.sum().clamp(min=1))
        if self._kl_options.exact:
            return replace(self._exact_share(policy_pass, inputs, mask, shares, ratio), effective=effective)
        per_token = self._term.per_token(
            policy_pass.logp, inputs[REFERENCE_LOGP], mask, behaviour_logp=behaviour
        )
        return Share(loss=(shares * per_token).sum(), per_token=per_token.detach(), effective=effective)

    def _exact_share(
        self,
        policy_pass: Pass,
        inputs: dict[str, Any],
        mask: Tensor,
        shares: Tensor,
        ratio: ImportanceWeights | None,
    ) -> Share:
        weights = shares if ratio is None else shares * ratio.values
        if policy_pass.hidden is None:
            raise OptionError("no hidden states were caught; the model's backbone was not run by its forward")
        head_p, head_q = self._heads()
        result = linear_kl_loss(
            policy_pass.hidden[mask],
            head_p,
            inputs[REFERENCE_HIDDEN][mask],
            head_q,
            weights=weights[mask].detach(),
            temperature=self.temperature,
            options=self._linear,
        )
        cost = torch.zeros_like(shares).masked_scatter(mask, result.per_token.to(shares.dtype))
        loss = result.loss
        rho = None if ratio is None else ratio.values
        if self._term.spec.scope == "sequence":
            loss = loss + (shares * future_kl_loss(policy_pass.logp, cost, mask, weights=rho)).sum()
        return Share(loss=loss, per_token=cost if rho is None else cost * rho)

    def _counted(self, inputs: dict[str, Any]) -> Bool[Tensor, "batch time"]:
        """Where a response's own tokens are: not padding, and not what a tool answered."""
        mask = inputs["completion_mask"].bool()
        return mask if inputs.get("tool_mask") is None else mask & inputs["tool_mask"].bool()

    def _behaviour(self, inputs: dict[str, Any]) -> Tensor | None:
        """Log-probabilities under what the tokens were drawn from, where that is not the policy as it is."""
        return inputs.get(BEHAVIOUR)

    def _note(self, share: Share, shares: Tensor, mask: Tensor, parts: int) -> None:
        """Log the KL that was trained, and what it is per token and per response."""
        sums = torch.stack(
            [
                (shares * share.per_token).sum() * parts,
                share.per_token.sum(),
                mask.sum().float(),
                torch.tensor(float(len(mask)), device=mask.device),
                torch.ones((), device=mask.device),
            ]
        )
        trained, kl, tokens, sequences, processes = self.accelerator.reduce(sums, reduction="sum").tolist()
        self._log(
            **{
                "kl": trained / processes,
                "kl/per_token": kl / max(tokens, 1.0),
                "kl/per_sequence": kl / sequences,
                "beta": self.beta,
            }
        )
        if share.effective is not None:
            self._log(**{"kl/effective_share": share.effective})

    def _log(self, **numbers: float) -> None:
        mode = "train" if self.model.training else "eval"
        for name, value in numbers.items():
            self._metrics[mode][name].append(value)
