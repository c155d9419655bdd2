"""Against the functions of the real OpenRLHF; ``test_zero3.py`` runs its command."""

import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kleash.auditing.targets.packages import quiet, stand_ins
from kleash.errors import CannotRunError, OptionError, ShapeError, UnknownNameError
from kleash.extras import require_attributes
from kleash.integrations.openrlhf import (
    STATE,
    KLController,
    _adaptive,
    _restore_with_controller,
    _step_with_mean_kl,
    compute_approx_kl,
    compute_reward,
    install,
)
from kleash.leash import DualBeta, FixedBeta, PIDBeta, ZieglerBeta

ABSENT = ("deepspeed", "flash_attn", "pylatexenc", "vllm", "uvicorn", "fastapi", "aiohttp")
HOLDERS = {
    "models.utils": ("compute_approx_kl", "compute_reward", "masked_mean"),
    "models.loss": ("aggregate_loss", "masked_mean"),
    "trainer.ppo_utils": ("AdaptiveKLController", "FixedKLController"),
    "trainer.ppo_utils.kl_controller": ("AdaptiveKLController", "FixedKLController"),
    "trainer.ppo_utils.experience_maker": ("compute_approx_kl", "compute_reward", "masked_mean"),
    "trainer.ppo_trainer": ("AdaptiveKLController", "FixedKLController"),
    "trainer.ray.ppo_actor": ("compute_approx_kl", "masked_mean", "aggregate_loss"),
}


@pytest.fixture(scope="module")
def theirs():
    """What OpenRLHF itself has under the names that kleash takes."""
    with stand_ins(ABSENT), quiet():
        pytest.importorskip("openrlhf.models.utils")
        modules = {name: __import__(f"openrlhf.{name}", fromlist=["_"]) for name in HOLDERS}
    own = {name: vars(modules[place])[name] for place, names in HOLDERS.items() for name in names}
    return SimpleNamespace(modules=modules, **own)


@pytest.fixture
def installed(theirs, monkeypatch):
    """OpenRLHF with kleash in it."""
    for place, names in HOLDERS.items():
        for name in names:
            monkeypatch.setattr(theirs.modules[place], name, getattr(theirs.modules[place], name))
    install(controller={"kind": "pid", "beta_max": 2.0})
    return theirs.modules


def value_and_gradient(function, log_probs, *others, **options):
    leaf = log_probs.clone().requires_grad_()
    value = function(leaf, *others, **options)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


ESTIMATORS = [("k2", False), ("k3", False), ("k1", True), ("k2", True), ("k3", True)]
TOKENS = st.lists(st.tuples(st.floats(-9, -0.1), st.floats(-2.3, 3.0), st.floats(-2.0, 2.0)), min_size=1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(tokens=TOKENS)
def test_estimators_equal_openrlhf_where_it_does_not_clamp(theirs, estimator, tokens):
    log_probs, ahead, moved = torch.tensor(tokens, dtype=torch.float32).T
    given = (log_probs - ahead, log_probs - moved, *estimator)
    ours = value_and_gradient(compute_approx_kl, log_probs, *given)
    expected = value_and_gradient(theirs.compute_approx_kl, log_probs, *given)
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_value_and_gradient_are_exact_beyond_openrlhf_clamps(theirs):
    log_probs, base = torch.tensor([-5.0, -30.0]), torch.tensor([-1.0, -2.0])
    assert value_and_gradient(theirs.compute_approx_kl, log_probs, base, kl_estimator="k2")[1][1] == 0
    value, gradient = value_and_gradient(compute_approx_kl, log_probs, base, kl_estimator="k3")
    assert value[0].item() == pytest.approx(math.exp(4) - 5, rel=1e-6)
    assert gradient[0].item() == pytest.approx(1 - math.exp(4), rel=1e-6)


def test_weighted_estimators_are_unbiased_off_policy():
    """Over all words, drawn from another policy: the gradient of KL(policy || reference), summed exactly."""
    torch.manual_seed(0)
    logits, others, behaviours = torch.randn(3, 7, dtype=torch.float64)
    logits.requires_grad_()
    logp, logq, logmu = logits.log_softmax(-1), others.log_softmax(-1), behaviours.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)
    for estimator in ("k1", "k2", "k3"):
        drawn = compute_approx_kl(logp, logq, logmu, kl_estimator=estimator, unbiased_gradient=True)
        (found,) = torch.autograd.grad((logmu.exp() * drawn).sum(), logits, retain_graph=True)
        torch.testing.assert_close(found, exact)


def test_cap_bounds_only_the_weight():
    given = torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([-6.0])
    options = {"kl_estimator": "k3", "unbiased_gradient": True}
    assert value_and_gradient(compute_approx_kl, *given, **options)[1].item() == pytest.approx(math.exp(5))
    value, gradient = value_and_gradient(compute_approx_kl, *given, **options, cap=3.0)
    assert gradient.item() == pytest.approx(3.0) and value.item() == pytest.approx(math.exp(-1), rel=1e-5)
    ruled_out = value_and_gradient(compute_approx_kl, given[0], torch.tensor([-math.inf]), **options)
    assert [x.item() for x in ruled_out] == [math.inf, 0.0]


def test_masked_nan_tokens_have_reward_0(theirs):
    scores, kl = torch.tensor([1.0, -2.0]), torch.tensor([[0.5, 1.0, 7.0], [0.25, 0.5, 1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    options = {"action_mask": mask, "reward_clip_range": (-1.0, 0.75)}
    expected = torch.tensor([[-0.05, 0.65, 0.0], [-0.025, -0.05, -1.1]])
    torch.testing.assert_close(compute_reward(scores, 0.1, kl, **options), expected)
    assert theirs.compute_reward(scores, 0.1, kl, **options)[0, 2].item() == pytest.approx(-0.7), "padding"
    kl[0, 2] = torch.nan
    torch.testing.assert_close(compute_reward(scores, 0.1, kl, **options), expected)
    assert compute_reward(scores, -1.0, kl, action_mask=mask.float())[1].tolist() == [0, 0, -2]


def test_install_replaces_names_in_importing_modules(theirs, installed):
    for place, names in HOLDERS.items():
        for name in names:
            assert getattr(installed[place], name) is not vars(theirs)[name]
    install(cap=2.0)
    again = installed["trainer.ray.ppo_actor"].compute_approx_kl
    assert again is installed["models.utils"].compute_approx_kl and again.keywords == {"cap": 2.0}


def test_a_coefficient_of_0_is_told(installed):
    trainer = installed["trainer.ppo_trainer"]
    with pytest.warns(UserWarning, match=r"init_coef is 0.*no KL is trained"):
        assert trainer.FixedKLController(0.0).value == 0
    with pytest.raises(OptionError, match="beta is 0"):
        trainer.AdaptiveKLController(0.0, 0.5, 1000)


@given(kls=st.lists(st.floats(0.0, 3.0), max_size=15))
def test_default_controller_equals_openrlhf_within_bounds(theirs, kls):
    ours, own = _adaptive({"kind": "ziegler"}, 0.1, 0.5, 1000), theirs.AdaptiveKLController(0.1, 0.5, 1000)
    assert isinstance(ours.leash, ZieglerBeta)
    for kl in kls:
        for controller in (ours, own):
            controller.update(kl, 100)
        assert ours.value == pytest.approx(own.value, rel=1e-12)
    own.update(math.nan, 1)
    ours.update(math.nan, 1)
    assert math.isnan(own.value) and ours.value > 0


def test_a_restored_state_is_that_of_any_kind_of_controller():
    def restored(controller, states):
        _restore_with_controller(lambda *_: None, SimpleNamespace(kl_ctl=controller), states)
        return controller.leash

    begun = PIDBeta(beta=0.1, target_nats=0.5, per="token").after(0.9).after(0.7)
    with pytest.warns(UserWarning, match=r"no state of a KL controller, so it begins anew at 0\.1"):
        restored(_adaptive({"kind": "pid"}, 0.1, 0.5, 1000), {"global_step": 3})  # from before kleash
    measured = {name: getattr(begun, name) for name in ("levels", "variance", "noise")}
    found = restored(_adaptive({"kind": "dual"}, 0.1, 0.5, 1000), {"global_step": 3, STATE: begun.to_dict()})
    assert found == DualBeta(beta=begun.beta, target_nats=0.5, per="token", **measured)
    assert restored(KLController(FixedBeta(beta=0.3)), {"global_step": 3, STATE: begun.to_dict()}).beta == 0.3


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, -1e4])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_tokens_are_not_in_openrlhf_means(theirs, installed, estimator, poison):
    """Value and gradient are OpenRLHF's own on a batch with 0 at masked tokens, for each aggregation."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    columns = torch.tensor([[[-1.0, -2.0, -3.0]] * 2, [[-1.5, -1.0, -2.0], [-2.0, -1.0, -2.0]]])
    own, zeros = theirs.compute_approx_kl, [torch.where(mask.bool(), x, 0.0) for x in columns]
    maker, actor = installed["trainer.ppo_utils.experience_maker"], installed["trainer.ray.ppo_actor"]
    for mean, own_mean, options in (
        (maker.masked_mean, theirs.masked_mean, {"dim": -1}),
        (actor.aggregate_loss, theirs.aggregate_loss, {"batch_num_tokens": 3.0}),
        (actor.aggregate_loss, theirs.aggregate_loss, {"token_level_loss": False}),
    ):

        def loss(log_probs, base, kl, mean, options=options):
            return mean(kl(log_probs, base, log_probs - 0.1, *estimator), mask, **options)

        expected = value_and_gradient(loss, *zeros, own, own_mean)
        poisoned = [torch.where(mask.bool(), x, poison) for x in columns]
        for pair in (poisoned, (columns[0], poisoned[1]), (poisoned[0], columns[1])):
            found = value_and_gradient(loss, *pair, actor.compute_approx_kl, mean)
            for ours, other in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, other)
        unmasked = torch.where(torch.tensor([True, False, True]), columns[1], torch.nan)
        assert value_and_gradient(loss, columns[0], unmasked, actor.compute_approx_kl, mean)[0].isnan().any()


def test_the_kl_of_a_dynamic_batch_is_its_mean(installed):
    """Of 2 of the 5 tokens of a step, the rest of which are in another batch."""
    mask, kl, trainer = torch.tensor([[1, 1, 0]]), torch.tensor([[1.0, 2.0, 9.0]]), MagicMock()
    sizes = {"dynamic_batch_num_tokens": [9.0, 5.0], "dynamic_global_batch_size": [7.0, 2.0]}
    trainer.replay_buffer = SimpleNamespace(**sizes)

    def step(trainer, experience, kl_ctl, number, info):
        assert (info["batch_num_tokens"], info["global_batch_size"]) == (5, 2), "those of OpenRLHF's loss"
        part = installed["models.loss"].aggregate_loss(kl, mask, **info)
        return {"metrics": {"kl": part}, "num_action_tokens": 2.0}

    status = _step_with_mean_kl(step, trainer, SimpleNamespace(action_mask=mask), 0.1, 1)
    assert status["metrics"]["kl"].item() == pytest.approx(1.5)


def test_a_response_without_tokens_is_not_in_the_mean_kl(installed, monkeypatch):
    """OpenRLHF's own function, on batches of two sizes, averaged over responses as its actors do."""
    place, maker = installed["trainer.ppo_utils.experience_maker"], MagicMock(critic_model_group=None)
    monkeypatch.setattr(place.ray, "put", lambda value: value)
    maker.strategy.args.algo.kl = SimpleNamespace(use_loss=False, estimator="k1")
    masks = [torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.tensor([[0, 1, 1]])]
    policy, reference = ([torch.randn(mask.shape, dtype=torch.float64) for mask in masks] for _ in range(2))
    maker._flatten_results.side_effect = [policy, reference, [None, None]]
    made = [MagicMock(action_mask=mask, info={}) for mask in masks]
    place.RemoteExperienceMaker.make_experience(maker, made)
    means = [(p - q)[mask.bool()].mean() for p, q, mask in zip(policy, reference, masks, strict=True)]
    for name in ("kl", "logprobs_diff"):
        found = sum(x.info[name].mean() * len(x.info[name]) for x in made) / 3
        assert found.item() == pytest.approx((sum(means) / 2).item(), rel=1e-6)


def test_invalid_arguments_are_refused(theirs, unhooked):
    with pytest.raises(OptionError, match="k1 backpropagated trains nothing"):
        value_and_gradient(compute_approx_kl, *torch.zeros(2, 3), kl_estimator="k1")
    with pytest.raises(UnknownNameError, match="no estimator is called 'k4'"):
        compute_approx_kl(torch.zeros(2), torch.zeros(2), kl_estimator="k4")
    with pytest.raises(ShapeError):
        compute_approx_kl(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(ShapeError, match="log_probs_old"):
        compute_approx_kl(*[torch.zeros(2, 3)] * 2, torch.zeros(2, 1), unbiased_gradient=True)
    with pytest.raises(UnknownNameError, match="no beta controller is called 'pd'"):
        install(controller={"kind": "pd"})
    with pytest.raises(OptionError, match="OpenRLHF sets beta; leave it out of the controller"):
        install(controller={"kind": "pid", "beta": 0.5})
    for call in (install, lambda **cap: compute_approx_kl(torch.zeros(2), torch.zeros(2), **cap)):
        with pytest.raises(OptionError, match="cap is 0; give a weight above 0"):
            call(cap=0)
    with pytest.raises(CannotRunError, match=r"the installed openrlhf lacks .*: argument 'cap'"):
        require_attributes("openrlhf", {"openrlhf.models.utils:compute_reward": ("cap",)})
    assert theirs.modules["trainer.ppo_trainer"].FixedKLController is theirs.FixedKLController
