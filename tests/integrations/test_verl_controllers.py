"""kleash's beta controllers behind verl's interface, against verl's own, and across its checkpoints."""

import json
import math
import warnings
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kleash_in_verl import kleash_in_verl

from kleash.auditing.targets.packages import quiet, stand_ins
from kleash.errors import CannotRunError, OptionError, RunFolderError, UnknownNameError
from kleash.integrations.verl import get_kl_controller, install
from kleash.integrations.verl.kl_controller import CONTROLLER_FILE, CONTROLLER_TYPES
from kleash.leash import DualBeta, PIDBeta, ZieglerBeta


@pytest.fixture(scope="module")
def core():
    with kleash_in_verl() as ours:
        yield SimpleNamespace(ours=ours, theirs=ours.own)


def configuration(**more):
    """What Hydra hands over: verl's own defaults, and what was asked for."""
    from omegaconf import OmegaConf

    target = "verl.trainer.config.KLControlConfig"
    return OmegaConf.create(
        {"_target_": target, "type": "fixed", "kl_coef": 0.1, "horizon": 1000, "target_kl": 0.05, **more}
    )


@given(kls=st.lists(st.floats(0.0, 5.0), max_size=20), batch=st.integers(1, 1000))
def test_adaptive_controller_equals_verl_within_bounds(core, kls, batch):
    ours, theirs = (x.get_kl_controller(configuration(type="adaptive")) for x in (core.ours, core.theirs))
    for kl in kls:
        for controller in (ours, theirs):
            controller.update(current_kl=kl, n_steps=batch)
        if 1e-4 < theirs.value < 100:
            assert ours.value == pytest.approx(theirs.value, rel=1e-12)
        else:
            break


TRAINED = [(False, True, 0.001), (True, False, 0.001), (True, True, 0.0)]
UNTRAINED = [(False, False, 0.001), (False, True, 0.0)]


@pytest.mark.parametrize("configured", TRAINED + UNTRAINED)
def test_a_configuration_that_trains_no_kl_is_told(core, configured):
    from omegaconf import OmegaConf

    in_reward, in_loss, coefficient = configured
    with quiet(), stand_ins(("uvicorn", "fastapi")):
        import verl.trainer.ppo.utils as asked
    actor = {"use_kl_loss": in_loss, "kl_loss_coef": coefficient}
    config = OmegaConf.create(
        {"algorithm": {"use_kl_in_reward": in_reward}, "actor_rollout_ref": {"actor": actor}}
    )
    OmegaConf.set_struct(config, True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert asked.need_reference_policy(config) is (in_reward or in_loss)
    assert ["no KL is trained" in str(warning.message) for warning in told] == [True] * (
        configured in UNTRAINED
    )


def test_a_fixed_coefficient_stays_and_0_is_told(core):
    for functions in (core.ours, core.theirs):
        controller = functions.get_kl_controller(configuration(kl_coef=0.02))
        controller.update(7.0, 64)
        assert controller.value == 0.02
    with pytest.warns(UserWarning, match="kl_coef is 0"):
        assert core.ours.get_kl_controller(configuration(kl_coef=0.0)).value == 0


def test_nan_and_large_updates_leave_beta_in_bounds(core):
    ours, theirs = (x.get_kl_controller(configuration(type="adaptive")) for x in (core.ours, core.theirs))
    for controller in (ours, theirs):
        controller.update(math.nan, 8)
        controller.update(0.0, 20_000)
    assert math.isnan(theirs.value) and ours.value == 0.05
    assert "a step of times -3 bounded to 0.5" in ours.leash.event


@pytest.mark.parametrize(
    ("kind", "made", "more"),
    [
        ("ziegler", ZieglerBeta, {"beta_max": 3.0}),
        ("pid", PIDBeta, {"integral": 0.2, "largest_step": 1.5}),
        ("dual", DualBeta, {"beta_min": 0.01}),
    ],
)
def test_each_type_makes_its_controller_with_options(core, kind, made, more):
    controller = core.ours.get_kl_controller(configuration(type=kind, **more))
    horizon = {"horizon": 1000} if kind == "ziegler" else {}
    expected = made(beta=0.1, target_nats=0.05, per="token", **horizon, **more)
    assert controller.leash == expected
    for kl in (0.2, 0.01, 0.3):
        controller.update(current_kl=kl, n_steps=16)
        expected = expected.after(kl, sequences=16)
    assert controller.value == expected.beta != 0.1


def test_verl_dataclass_and_plain_object_are_accepted(core):
    from verl.trainer.config import KLControlConfig

    given = {"type": "pid", "kl_coef": 0.3, "target_kl": 2.0, "horizon": 1}
    for configured in (KLControlConfig(**given), SimpleNamespace(**given)):
        assert get_kl_controller(configured).leash == PIDBeta(beta=0.3, target_nats=2.0, per="token")


def test_invalid_options_are_refused(core):
    with pytest.raises(UnknownNameError, match="no type of KL controller is called 'pd'"):
        core.ours.get_kl_controller(configuration(type="pd"))
    with pytest.raises(OptionError, match=r"verl sets per, target_nats; leave it out"):
        core.ours.get_kl_controller(configuration(type="pid", per="token", target_nats=4.0))
    with pytest.raises(OptionError, match=r"beta is 1e-05, outside 0\.0001 to 100"):
        core.ours.get_kl_controller(configuration(type="adaptive", kl_coef=1e-5))
    assert set(CONTROLLER_TYPES) == {"fixed", "adaptive", "ziegler", "pid", "dual"}
    with pytest.raises(UnknownNameError, match="no divergence is called 'backward_kl'"):
        install(top_k_distillation="backward_kl")


@pytest.fixture(scope="module")
def trainer_class(core):
    """verl's own v1 trainer, without what serves its rollouts."""
    with quiet(), stand_ins(("uvicorn", "fastapi", "transfer_queue", "aiohttp")):
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    return type("PPOTrainer", (PPOTrainer,), {"on_step_end": None, "on_sample_end": None})


def trainer(core, kind, folder, *, resume="auto", resume_from=None, **kl_ctrl):
    """One that was never started, with workers that save and load nothing."""
    from omegaconf import OmegaConf

    made = object.__new__(kind)
    settings = {"default_local_dir": str(folder), "default_hdfs_dir": None, "resume_mode": resume}
    settings |= {"resume_from_path": resume_from, "del_local_ckpt_after_load": False}
    actor = {"checkpoint": {"async_save": False}}
    made.config = OmegaConf.create({"trainer": settings, "actor_rollout_ref": {"actor": actor}})
    made.kl_ctrl_in_reward = core.ours.get_kl_controller(configuration(**kl_ctrl))
    made.global_steps, made.use_critic, made.trainer_mode = 2, False, "sync"
    made.actor_rollout_wg = made.checkpoint_callback = MagicMock()
    made.train_dataloader = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)
    return made


def test_controller_state_survives_resume(core, trainer_class, tmp_path):
    run = tmp_path / "project" / "run"
    first = trainer(core, trainer_class, run, type="pid", beta_max=5.0)
    for kl in (0.2, 0.25):
        first.kl_ctrl_in_reward.update(kl, 8)
    saved = first.kl_ctrl_in_reward.leash
    first.actor_rollout_wg.save_checkpoint.side_effect = lambda *_, **__: read.append(folder.read_text())
    folder, read = run / "global_step_2" / CONTROLLER_FILE, []
    first._save_checkpoint()
    (written,) = [json.loads(text) for text in read]  # before verl calls the checkpoint whole
    assert written == saved.to_dict()
    second = trainer(core, trainer_class, run, type="pid", beta_max=5.0)
    second._load_checkpoint()
    assert second.global_steps == 2 and second.kl_ctrl_in_reward.leash == saved
    named = {"resume": "resume_path", "resume_from": str(run / "global_step_2")}
    other = trainer(core, trainer_class, tmp_path / "new", type="dual", target_kl=9.0, **named)
    other._load_checkpoint()
    assert saved.levels
    states = {name: getattr(saved, name) for name in ("beta", "levels", "variance", "noise")}
    resumed = DualBeta(**states, target_nats=9.0, per="token")
    assert other.kl_ctrl_in_reward.leash == resumed, "what was measured is kept under another target"


def test_a_damaged_state_is_not_loaded(core, trainer_class, tmp_path):
    first = trainer(core, trainer_class, tmp_path, type="pid", beta_max=5.0)
    first.kl_ctrl_in_reward.update(0.4, 8)
    first._save_checkpoint()
    path = tmp_path / "global_step_2" / CONTROLLER_FILE
    whole, state = path.read_text(), json.loads(path.read_text())
    moved = [{**state, name: x * 1.5 + 0.25} for name, x in state.items() if isinstance(x, float)]
    for content in (*map(json.dumps, moved), whole[: len(whole) // 2]):
        path.write_text(content)
        with pytest.raises(
            RunFolderError, match=r"_controller.json is damaged.*; remove it to start the con"
        ):
            trainer(core, trainer_class, tmp_path, type="pid")._load_checkpoint()
    path.write_text(whole)
    path.with_name("checksums.jsonl").unlink()
    with pytest.raises(RunFolderError, match="cannot be trusted"):
        trainer(core, trainer_class, tmp_path, type="pid")._load_checkpoint()


def test_checkpoint_without_controller_state_is_noted(core, trainer_class, tmp_path):
    plain = trainer(core, trainer_class, tmp_path, type="fixed")
    plain._save_checkpoint()
    (tmp_path / "global_step_2" / CONTROLLER_FILE).unlink()
    plain._load_checkpoint()
    with pytest.warns(UserWarning, match=r"no state of a KL controller, so it begins anew at 0\.1"):
        trainer(core, trainer_class, tmp_path, type="pid")._load_checkpoint()
    fresh = trainer(core, trainer_class, tmp_path / "new", type="pid")
    fresh._load_checkpoint()
    assert fresh.global_steps == 0 and fresh.kl_ctrl_in_reward.value == 0.1


def test_replaced_functions_are_checked_and_keep_argument_names(core, monkeypatch):
    install()  # kleash's functions have verl's arguments
    monkeypatch.delattr(core.ours, "kl_penalty_forward")
    with pytest.raises(CannotRunError, match=r"the installed verl lacks .*core_algos:kl_penalty_forward"):
        install()
