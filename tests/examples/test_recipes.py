"""The recipes for frameworks that are not installed here, by the signatures that they had in August 2026."""

import json
import math
import re
import sys
from argparse import Namespace
from copy import deepcopy
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import guessing_game
import prime_rl_loss
import pytest
import skyrl_rewards
import slime_advantages
import tinker_loss
import torch
import vllm_hidden_states

from kleash.auditing.targets.packages import quiet
from kleash.errors import CannotRunError, OptionError, ShapeError
from kleash.leash import PIDBeta
from kleash.losses import KLTerm
from kleash.training import load_rewards
from kleash.training.reward_models import Dialogue

NAN = float("nan")
VOCAB_SIZE = 6


@dataclass
class Inputs:
    """The fields of prime-rl's LossInputs, in its order."""

    trainer_logprobs: Any
    inference_logprobs: Any
    ref_logprobs: Any
    advantages: Any
    loss_mask: Any
    loss_weights: Any = field(default=None)


@dataclass
class Outputs:
    """The fields of prime-rl's LossOutputs."""

    loss: Any
    metrics: Any


@pytest.fixture
def prime(monkeypatch):
    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.trainer.rl.loss"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = sys.modules["prime_rl.trainer.rl.loss"]
    module.LossInputs, module.LossOutputs = Inputs, Outputs
    prime_rl_loss._loss_outputs.cache_clear()
    yield module
    prime_rl_loss._loss_outputs.cache_clear()


def enumerated_tokens():
    """Policy, reference and engine over six tokens, for expectations as sums over the tokens."""
    torch.manual_seed(1)
    logits, reference, engine = torch.randn(3, VOCAB_SIZE, dtype=torch.float64).unbind()
    logits.requires_grad_()
    return logits, logits.log_softmax(-1), reference.log_softmax(-1), engine.log_softmax(-1)


def gradient_of_kl(logits, logp, logq):
    return torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)[0]


@pytest.mark.parametrize("against", ["inference", "reference"])
def test_prime_rl_has_the_gradient_of_the_kl_in_expectation(prime, against):
    logits, logp, logq, engine = enumerated_tokens()
    expected_loss = 0.0
    for token in range(VOCAB_SIZE):
        row = slice(token, token + 1)
        no_advantage, mask = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.bool)
        inputs = Inputs(logp[row], engine[row].detach(), logq[row].detach(), no_advantage, mask)
        loss = prime_rl_loss.leashed_loss(inputs, beta=0.3, against=against).loss
        expected_loss = expected_loss + engine[token].exp() * loss
    (gradient,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    other = engine if against == "inference" else logq
    torch.testing.assert_close(gradient, 0.3 * gradient_of_kl(logits, logp, other))
    assert expected_loss.item() == pytest.approx(0.3 * (logp.exp() * (logp - other)).sum().item())


def test_prime_rl_sums_unmasked_tokens_within_the_trust_region(prime):
    logp = torch.tensor([-0.2, -1.0, -0.1, NAN], requires_grad=True)
    engine = torch.tensor([-1.5, -1.1, -0.1, NAN])
    mask, weights = torch.tensor([True, True, True, False]), torch.tensor([1.0, 0.5, 2.0, NAN])
    inputs = Inputs(logp, engine, None, torch.tensor([1.0, 2.0, -1.0, NAN]), mask, weights)
    out = prime_rl_loss.leashed_loss(inputs, beta=0.0)
    assert isinstance(out, Outputs) and out.loss.shape == ()
    rho = math.exp(0.1)
    assert out.loss.item() == pytest.approx(-0.5 * 2 * rho + 2 * 1.0)  # the first is out, and pushed further
    (gradient,) = torch.autograd.grad(out.loss, logp)
    assert gradient.tolist() == pytest.approx([0, -rho, 2, 0])
    assert out.metrics["removed"].item() == pytest.approx(1 / 3)
    ahead = torch.tensor([1.3, 0.1, 0.0])
    kl = (ahead.exp() * ((-ahead).exp() - 1 + ahead)).mean()
    assert out.metrics["kl"].item() == pytest.approx(kl.item(), rel=1e-5)
    everywhere = prime_rl_loss.leashed_loss(inputs, beta=0.0, most_total_variation=None)
    assert everywhere.loss.item() == pytest.approx(out.loss.item() - math.exp(1.3))
    capped = prime_rl_loss.leashed_loss(inputs, beta=1.0, cap=1.0).loss - out.loss
    by_hand = ((-ahead).exp() - 1 + ahead)[:2] @ weights[:2]
    assert capped.item() == pytest.approx(by_hand.item(), rel=1e-5)
    inputs.loss_mask = torch.zeros(4, dtype=torch.bool)
    empty = prime_rl_loss.leashed_loss(inputs, beta=1.0)
    assert empty.loss.item() == 0 and empty.metrics == {}


def test_prime_rl_raises_on_a_missing_reference_and_on_changed_records(prime, monkeypatch):
    value = torch.full((1,), -1.0, requires_grad=True)
    inputs = Inputs(value, value, None, torch.ones(1), torch.tensor([True]))
    with pytest.raises(OptionError, match="passes no reference log-probabilities for this algorithm"):
        prime_rl_loss.leashed_loss(inputs, beta=1.0, against="reference")
    with pytest.raises(OptionError, match="against is 'old'; there are inference, reference"):
        prime_rl_loss.leashed_loss(inputs, beta=1.0, against="old")
    other = dataclass(type("Other", (), {"__annotations__": {"loss": Any}}))
    monkeypatch.setattr(prime, "LossOutputs", other)
    with pytest.raises(CannotRunError, match=r"prime-rl lacks LossOutputs\.metrics; this recipe was written"):
        prime_rl_loss.leashed_loss(inputs, beta=1.0)


def test_slime_advantages_subtract_k1_of_the_token_and_later_tokens():
    policy = [torch.tensor([-1.0, -2.0, NAN, -0.5]), torch.tensor([-3.0])]
    reference = [torch.tensor([-2.0, -1.5, 0.0, -1.0]), torch.tensor([-1.0])]
    masks = [torch.tensor([1, 1, 0, 1], dtype=torch.int), torch.tensor([1], dtype=torch.int)]
    data = {"log_probs": policy, "ref_log_probs": reference, "rewards": [1.0, -0.5], "loss_masks": masks}
    args = Namespace(kl_coef=0.1, use_rollout_logprobs=False)
    assert slime_advantages.leashed_advantages(args, data) is None
    assert data["advantages"][0].tolist() == pytest.approx([1 - 0.1, 1.0, 0.0, 1 - 0.05])
    assert data["advantages"][1].tolist() == pytest.approx([-0.5 + 0.2])
    assert all(torch.equal(x, y) for x, y in zip(data["returns"], data["advantages"], strict=True))
    data |= {"rollout_log_probs": reference}
    slime_advantages.leashed_advantages(Namespace(kl_coef=0.1, use_rollout_logprobs=True), data)
    assert data["advantages"][0].tolist() == [1, 1, 0, 1], "by the engine's, where slime uses them"
    del data["ref_log_probs"]
    slime_advantages.leashed_advantages(Namespace(kl_coef=0.0, use_rollout_logprobs=False), data)
    assert data["advantages"][1].tolist() == [-0.5], "without a KL no reference is needed"


def test_slime_raises_on_missing_entries_and_split_responses():
    args, logprobs = Namespace(kl_coef=0.1), [torch.zeros(2)]
    data = {"log_probs": logprobs, "rewards": [1.0], "loss_masks": [torch.ones(2)]}
    with pytest.raises(CannotRunError, match=r"slime passed no ref_log_probs; this recipe was written for"):
        slime_advantages.leashed_advantages(args, data)
    with pytest.raises(CannotRunError, match="passed no kl_coef"):
        slime_advantages.leashed_advantages(Namespace(), data)
    data |= {"ref_log_probs": logprobs, "loss_masks": [torch.ones(4)]}
    with pytest.raises(CannotRunError, match=r"a response has 4 tokens and 2 log-probabilities here"):
        slime_advantages.leashed_advantages(args, data)


class Trainer:
    """What of SkyRL's RayPPOTrainer the penalty reads and writes."""

    def __init__(self, coefficient=0.1):
        algorithm = SimpleNamespace(kl_loss_coef=coefficient)
        self.cfg = SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm))
        self.all_metrics, self.reward_kl_controller = {}, None

    def apply_reward_kl_penalty(self, data):
        raise AssertionError("SkyRL's own")


class LeashedTrainer(skyrl_rewards.LeashedRewards, Trainer):
    pass


class Batch(dict):
    """A dictionary of tensors with metadata beside them."""

    def __init__(self):
        super().__init__(
            action_log_probs=torch.tensor([[-1.0, -2.0, NAN], [-0.5, -3.0, -1.0]]),
            base_action_log_probs=torch.tensor([[-2.0, -1.5, NAN], [-0.5, -9.0, -1.0]]),
            loss_mask=torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]),
            rewards=torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]),
        )
        self.metadata = {}


def test_skyrl_subtracts_k1_from_the_rewards_of_unmasked_tokens():
    trainer, data = LeashedTrainer(), Batch()
    assert trainer.apply_reward_kl_penalty(data) is data
    expected = torch.tensor([[-0.1, 1.05, 0.0], [0.0, -0.6, 2.0]])
    torch.testing.assert_close(data["rewards"], expected)
    ahead = torch.tensor([1.0, -0.5, 0.0, 6.0, 0.0])
    k3 = (-ahead).exp() - 1 + ahead
    assert trainer.all_metrics["loss/avg_kl"] == pytest.approx(k3.mean().item(), rel=1e-6)
    most = (k3[0].item() + k3[3].item()) / 2
    assert data.metadata["metrics"]["avg_kl_max"] == pytest.approx(most, rel=1e-6)
    assert data.metadata["metrics"]["kl_loss_coef"] == 0.1
    nothing, free = Batch(), LeashedTrainer(coefficient=-1.0)
    free.apply_reward_kl_penalty(nothing)
    assert torch.equal(nothing["rewards"], Batch()["rewards"])


def test_skyrl_takes_beta_from_the_leash_or_from_its_own_controller():
    trainer = LeashedTrainer()
    trainer.leash = start = PIDBeta(beta=0.2, target_nats=1.0)
    data = trainer.apply_reward_kl_penalty(Batch())
    assert data["rewards"][0, 0].item() == pytest.approx(-0.2)
    ahead = torch.tensor([[1.0, -0.5, 0.0], [0.0, 6.0, 0.0]])
    sums = ((-ahead).exp() - 1 + ahead).sum(-1).mean()
    assert trainer.leash.beta == pytest.approx(start.after(sums, sequences=2).beta)
    with_controller = LeashedTrainer()
    updates = []

    def update(current, n_steps):
        updates.append((current, n_steps))

    with_controller.reward_kl_controller = SimpleNamespace(value=0.3, update=update)
    data = with_controller.apply_reward_kl_penalty(Batch())
    assert data["rewards"][0, 0].item() == pytest.approx(-0.3)
    assert updates == [(pytest.approx(with_controller.all_metrics["loss/avg_kl"]), 2)]


def test_skyrl_mixin_requires_a_trainer_as_base_class():
    with pytest.raises(CannotRunError, match="Alone has no base class with apply_reward_kl_penalty after"):
        type("Alone", (skyrl_rewards.LeashedRewards,), {})


def test_tinker_has_the_gradient_of_the_kl_and_the_advantages_in_expectation():
    """The expectation over tokens of an older policy, as a sum, has the gradient of the KL."""
    logits, logp, logq, sampler = enumerated_tokens()
    mask = torch.ones(1)
    losses = [
        tinker_loss.leashed_loss(
            KLTerm(ratio="token"),
            beta=0.5,
            masks=[mask],
            reference_logprobs=[logq[token : token + 1]],
            sampled_logprobs=[sampler[token : token + 1]],
            advantages=[torch.full((1,), float(token))],
        )
        for token in range(VOCAB_SIZE)
    ]
    total = 0.0
    for token, function in enumerate(losses):
        loss, metrics = function([object()], [logp[token : token + 1]])
        assert loss.shape == () and all(type(value) is float for value in metrics.values())
        total = total + sampler[token].exp() * loss
    (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)
    (gain,) = torch.autograd.grad(logp.exp() @ torch.arange(VOCAB_SIZE).double(), logits, retain_graph=True)
    torch.testing.assert_close(gradient, 0.5 * gradient_of_kl(logits, logp, logq) - gain)


def test_tinker_sums_unmasked_tokens_and_returns_metrics():
    logp = [torch.tensor([-1.0, NAN, -2.0], requires_grad=True), torch.tensor([-0.5], requires_grad=True)]
    columns = {
        "masks": [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0])],
        "reference_logprobs": [torch.tensor([-1.5, NAN, -2.0]), torch.tensor([-3.5])],
        "sampled_logprobs": [torch.tensor([-1.0, NAN, -2.0]), torch.tensor([-0.5])],
    }
    function = tinker_loss.leashed_loss(KLTerm(estimator="k2"), beta=2.0, **columns)
    loss, metrics = function([None, None], logp)
    assert loss.item() == pytest.approx(2 * (0.125 + 4.5))
    assert metrics == {"kl": pytest.approx((0.125 + 4.5) / 3), "tokens": 3.0}
    loss.backward()
    assert [x.grad.tolist() for x in logp] == [[1.0, 0.0, 0.0], [6.0]]
    with pytest.raises(ShapeError, match=r"datum by datum: \[3\], \[3, 1\], \[3, 1\], \[3, 1\], \[3\]; pass"):
        function([None], logp[:1])


def test_vllm_is_told_which_layers_to_save_and_its_log_probabilities_are_written(tmp_path, monkeypatch):
    calls = []

    class LLM:
        def __init__(self, **options):
            calls.append(options)

        def generate(self, prompts, sampling):
            assert sampling == {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            for prompt in prompts:
                ids = prompt["prompt_token_ids"]
                entries = [None, *({token: SimpleNamespace(logprob=-0.5 * token)} for token in ids[1:])]
                yield SimpleNamespace(prompt_token_ids=ids, prompt_logprobs=entries)

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, dict
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_hidden_states, "REQUESTS_AT_ONCE", 1)
    requests = [[0, 4, 6], [0, 2]]
    vllm_hidden_states.save_hidden_states("R", requests, tmp_path, layers=[2, 36], tensor_parallel_size=4)
    (options,) = calls
    assert options["tensor_parallel_size"] == 4 and options["enable_chunked_prefill"] is False
    draft = options["speculative_config"]["draft_model_config"]["hf_config"]
    assert draft == {"eagle_aux_hidden_state_layer_ids": [2, 36]}
    connector = options["kv_transfer_config"]
    assert connector["kv_connector"] == "ExampleHiddenStatesConnector"
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path)}
    lines = [json.loads(line) for line in (tmp_path / "logprobs.jsonl").read_text().splitlines()]
    assert lines == [
        {"token_ids": [0, 4, 6], "logprobs": [None, -2.0, -3.0]},
        {"token_ids": [0, 2], "logprobs": [None, -1.0]},
    ]


def test_the_requests_for_vllm_are_the_sequences_of_the_source(tmp_path):
    source = tmp_path / "rollouts.jsonl"
    rows = [{"prompt_token_ids": [3, 4], "response_token_ids": [5, 6, n]} for n in (7, 8)]
    source.write_text("\n".join(map(json.dumps, rows)))
    requests = vllm_hidden_states.token_requests("shipped:reference", responses=str(source))
    assert list(requests) == [[3, 4, 5, 6, 7], [3, 4, 5, 6, 8]]


class Judge(BaseHTTPRequestHandler):
    """A reward server: 1 where the response has the answer, and 500 for an empty batch."""

    def do_POST(self):
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rewards = [float(a in r) for a, r in zip(sent["answer"], sent["responses"], strict=True)]
        self.send_response(200 if "".join(sent["responses"]) else 500)
        self.end_headers()
        self.wfile.write(json.dumps({"rewards": rewards}).encode())

    def log_message(self, *_):
        pass


@pytest.mark.filterwarnings("ignore:Exception ignored while calling deallocator")  # HTTPError, Python 3.14
def test_a_server_rewards_responses_by_a_column(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("REWARD_SERVER", f"http://127.0.0.1:{server.server_port}")
    try:
        rewards = load_rewards(["2*reward_server:judged"])
        right = Dialogue(prompt="2 + 2 =", response=" 4.", columns={"answer": "4", "level": 1})
        wrong = Dialogue(prompt="3 + 3 =", response=" 6.", columns={"answer": "9", "level": None})
        assert rewards.of_dialogues([right, wrong]).total.tolist() == [2.0, 0.0]
        with pytest.raises(CannotRunError, match=r"reward_server:judged raises HTTPError: HTTP Error 500"):
            rewards.of_dialogues([replace(right, response="")])
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.peers("trl")
@pytest.mark.filterwarnings("ignore:.*(environment_factory|gradient_checkpointing).*")
def test_the_kl_of_a_game_leaves_out_what_the_game_says(tmp_path):
    from datasets import Dataset
    from tiny_models import save_tiny, tiny_tokenizer
    from trl_batches import logged, make, moved, whole_logp

    with quiet():
        import trl
        from trl.chat_template_utils import qwen3_chat_template

        from kleash.integrations.trl import LeashedGRPOTrainer
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.chat_template = qwen3_chat_template
    prompt = [{"role": "user", "content": "Which digit is it?"}]
    rows = [{"prompt": prompt, "secret": secret} for secret in (3, 3, 7, 7)]
    folder = str(save_tiny(tmp_path / "tiny", max_position_embeddings=2048))
    settings = {"max_completion_length": 600, "max_steps": 1}
    options = {"environment_factory": guessing_game.GuessingGame, "reward_funcs": [], "kl": "exact"}
    options |= {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    trainer = make(LeashedGRPOTrainer, trl.GRPOConfig, folder, tmp_path, config_of=settings, **options)
    moved(trainer.model, 0.2)
    turns = [["5", "4", "none", "7"], ["3", "2", "none"], ["none", "3"], ["none"]]  # of the games that go on
    call = '<tool_call>\n{"name": "guess", "arguments": {"digit": DIGIT}}\n</tool_call>'

    def answers(input_ids, **_):
        texts = [call.replace("DIGIT", each) if each.isdigit() else each for each in turns.pop(0)]
        batch = tokenizer([text + "</s>" for text in texts], padding=True, padding_side="right")
        return torch.cat([input_ids, torch.tensor(batch["input_ids"])[:, 1:]], 1)

    trainer.model.generate = answers
    output = trainer._generate_and_score_completions(rows)
    del trainer.model.generate
    own, real = output["tool_mask"].bool(), output["completion_mask"].bool()
    texts = map(tokenizer.decode, output["completion_ids"].where(real & ~own, tokenizer.pad_token_id))
    replies = [" ".join(re.findall(r"<tool_response>\n(\w+)\n<", text)) for text in texts]
    assert replies == ["lower won", "lower higher won", "", "won"]
    assert [round(each, 2) for each in output["advantages"].tolist()] == [0, 0, -0.71, 0.71]  # of 1, 1, 0, 1
    trainer._compute_loss(trainer.model, {**output, "num_items_in_batch": output["completion_mask"].sum()})
    logp, logq = (whole_logp(model, output, 1.0).detach() for model in (trainer.model, trainer.ref_model))
    kl = (logp.exp() * (logp - logq)).sum(-1)[real & own].mean().item()
    assert logged(trainer, "kl/per_token") == pytest.approx(kl, rel=1e-4) and kl > 1e-3
    trainer.train()
    assert trainer.state.global_step == 1
