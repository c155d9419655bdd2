"""Whole steps against plain float64: one sequence at a time, all logits, loops over tokens, Adam by its formulas."""

import math
from collections import Counter

import pytest
import torch
from ppo_cases import ready, rollout_of, tiny_job
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from kleash.training.checkpoints import TrainingState
from kleash.training.job_schedule import leash_of
from kleash.training.networks import LORA_SCALE
from kleash.training.ppo import one_step

KINDS = (
    "exact-loss-token", "exact-loss-sequence", "exact-reward-sequence", "k2-loss-token", "k3-loss-token",
    "k3-loss-sequence", "k1-loss-token", "k1-loss-sequence", "k1-reward-sequence", "exact-loss-sequence-adapter",
)  # fmt: skip
SETTINGS = {
    "dtype": "float64", "beta": 0.3, "controller": "pid", "target_nats": 0.5, "ent_coef": 0.01, "temperature": 0.7,
    "gae_lambda": 0.9, "gamma": 0.97, "clip_range": 0.05, "clip_range_value": 0.02, "prompts_per_step": 5,
    "minibatches": 3, "reward": ("ppo_cases:moody",), "seed": 3,
}  # fmt: skip


class Plain:
    """PPO as the papers write it: every sequence alone, without padding, nothing of kleash's arithmetic."""

    def __init__(self, job, networks):
        self.job = job
        names = (job.policy, job.reference_name)
        self.policy, self.reference = (
            AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64) for name in names
        )
        self.trained = {
            name: weight.detach().clone().requires_grad_()
            for name, weight in networks.named_parameters()
            if weight.requires_grad
        }
        self.moments = dict.fromkeys(self.trained, (0.0, 0.0))
        self.updates = 0

    def weights(self):
        """Those of the policy now; an adapter's product is added to the weight below it."""
        weights = {name: weight.detach() for name, weight in self.policy.named_parameters()}
        for name, weight in self.trained.items():
            stem, adapter, _ = name.removeprefix("network.").partition(".lora_A")
            if adapter:
                product = self.trained[name.replace("lora_A", "lora_B")] @ weight
                weights[f"{stem}.weight"] = weights[f"{stem}.weight"] + LORA_SCALE * product
            elif stem in weights:
                weights[stem] = weight
        return weights

    def read(self, network, weights, one):
        """Log-probabilities of every token at each place a response token is drawn, and the critic's values."""
        ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
        out = functional_call(network, weights, kwargs={"input_ids": ids, "output_hidden_states": True})
        places = slice(len(one.prompt_ids) - 1, ids.shape[1] - 1)
        logp = (out.logits[0, places] / self.job.temperature).log_softmax(-1)
        hidden = out.hidden_states[-1][0, places].detach()  # the critic moves nothing but itself
        return logp, (hidden @ self.trained["value.weight"].T + self.trained["value.bias"])[:, 0]

    @torch.no_grad()
    def remember(self, sequences, scores, beta):
        """Old log-probabilities, KLs, values; advantages from rewards by loops over the tokens."""
        job, self.sequences, later = self.job, sequences, []
        self.old = [self.read(self.policy, self.weights(), one) for one in sequences]
        self.logq = [self.read(self.reference, {}, one)[0] for one in sequences]
        self.advantages, self.returns = [], []
        for one, score, (logp, values), logq in zip(sequences, scores, self.old, self.logq, strict=True):
            u = (logp - logq).gather(1, torch.tensor(one.response_ids)[:, None])[:, 0].tolist()
            exact = (logp.exp() * (logp - logq)).sum(-1).tolist()
            cost = {"exact": exact, "k1": u}.get(job.kl, [math.exp(-x) - 1 + x for x in u])
            length, running, advantages = len(u), 0.0, [0.0] * len(u)
            for t in reversed(range(length)):
                reward = float(score) if t == length - 1 else 0.0
                if job.kl_place == "reward":
                    led_to = job.gamma * exact[t + 1] if t + 1 < length else 0.0
                    reward -= beta * (u[t] if job.kl == "k1" else led_to)
                following = values[t + 1].item() if t + 1 < length else 0.0
                running = (
                    reward + job.gamma * following - values[t].item() + job.gamma * job.gae_lambda * running
                )
                advantages[t] = running
            self.advantages.append(advantages)
            self.returns.append([a + v for a, v in zip(advantages, values.tolist(), strict=True)])
            later.append([sum(cost[t + 1 :]) for t in range(length)])
        if (job.kl_place, job.kl_scope) == ("loss", "sequence"):
            for row, advantages in enumerate(self.advantages):
                for t in range(len(advantages)):
                    others = [
                        costs[t] for other, costs in enumerate(later) if other != row and t < len(costs)
                    ]
                    advantages[t] -= beta * (later[row][t] - (sum(others) / len(others) if others else 0.0))
        flat = torch.tensor([a for advantages in self.advantages for a in advantages], dtype=torch.float64)
        mean, std = (flat.mean().item(), flat.std().item()) if job.whiten else (0.0, 1.0)
        self.advantages = [[(a - mean) / std for a in advantages] for advantages in self.advantages]
        self.scaled_beta, self.tokens = beta / std, len(flat)

    def loss(self, rows, told):
        """The loss of a minibatch; sums over its tokens are added to ``told``."""
        job, total, weights = self.job, 0.0, self.weights()
        for row in rows:
            logp, values = self.read(self.policy, weights, self.sequences[row])
            logq, (old_logp, old_values) = self.logq[row], self.old[row]
            for t, token in enumerate(self.sequences[row].response_ids):
                ratio, a = (logp[t, token] - old_logp[t, token]).exp(), self.advantages[row][t]
                gain = torch.minimum(ratio * a, ratio.clamp(1 - job.clip_range, 1 + job.clip_range) * a)
                total = total - gain + job.ent_coef * (logp[t].exp() * logp[t]).sum()
                if job.kl == "exact":
                    total = total + self.scaled_beta * (logp[t].exp() * (logp[t] - logq[t])).sum()
                elif job.kl_place == "loss":  # the gradient that matters: ratio u on log p
                    u = logp[t, token] - logq[t, token]
                    total = total + self.scaled_beta * (ratio * u).detach() * logp[t, token]
                error, change = (values[t] - self.returns[row][t]) ** 2, values[t] - old_values[t]
                near = old_values[t] + change.clamp(-job.clip_range_value, job.clip_range_value)
                error = torch.maximum(error, (near - self.returns[row][t]) ** 2)
                total = total + job.vf_coef * error / 2
                told["tokens"] += 1
                told["policy/loss"] -= gain.item()
                told["policy/ratio_mean"] += ratio.item()
                told["policy/clip_share"] += gain.item() < (ratio * a).item()
                told["value/loss"] += error.item() / 2
                told["value/clip_share"] += abs(change.item()) > job.clip_range_value
        return total / (self.tokens / job.minibatches)

    def update(self, loss):
        """A step of Adam with the gradients of policy and critic clipped apart; returns the norm of the policy's."""
        gradients = torch.autograd.grad(loss, list(self.trained.values()))
        norms = Counter()
        for name, gradient in zip(self.trained, gradients, strict=True):
            norms[name.startswith("value.")] += gradient.square().sum().item()
        self.updates += 1
        for (name, weight), gradient in zip(self.trained.items(), gradients, strict=True):
            norm = math.sqrt(norms[name.startswith("value.")])
            clipped = gradient * min(1.0, self.job.max_gradient_norm / (norm + 1e-6))
            first, second = self.moments[name]
            first, second = 0.9 * first + 0.1 * clipped, 0.999 * second + 0.001 * clipped**2
            self.moments[name] = first, second
            slope, size = first / (1 - 0.9**self.updates), second / (1 - 0.999**self.updates)
            weight.data -= self.job.learning_rate * slope / (size.sqrt() + 1e-8)
        return math.sqrt(norms[False])

    def step(self, sequences, scores, beta):
        """Metrics of a step, after its updates."""
        self.remember(sequences, scores, beta)
        told, norms = Counter(), []
        for _ in range(self.job.epochs):
            for minibatch in range(self.job.minibatches):
                rows = range(minibatch, len(sequences), self.job.minibatches)
                norms.append(self.update(self.loss(rows, told)))
        metrics = {name: value / told["tokens"] for name, value in told.items() if name != "tokens"}
        with torch.no_grad():
            now = [self.read(self.policy, self.weights(), one)[0] for one in sequences]
        kls = [(old.exp() * (old - new)).sum().item() for (old, _), new in zip(self.old, now, strict=True)]
        of_updates = {"policy/gradient_norm": sum(norms) / len(norms), "kl/update": sum(kls) / self.tokens}
        return {**metrics, **of_updates}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ppo-loss")


@pytest.mark.parametrize("kind", KINDS)
def test_steps_match_plain_formulas(folder, kind):
    """Two steps of six updates, with uneven minibatches, tokens and values clipped and not, and a moving beta."""
    kl, place, scope, *adapter = kind.split("-")
    placed = {"kl": kl, "kl_place": place, "kl_scope": scope, "whiten": kind != "exact-loss-token"}
    trained = {"learning_rate": 3e-2, "lora_rank": 2} if adapter else {"learning_rate": 3e-3}
    architecture = "qwen3" if kl == "k3" else "llama"  # whose head is tied, or not
    job = tiny_job(folder, architecture, **SETTINGS, **placed, **trained)
    run, prompts = ready(job)
    plain, leash = Plain(job, run.networks), leash_of(job)
    progress = TrainingState(leash=leash.to_dict(), learning_rate=job.learning_rate)
    for step in (1, 2):
        rollout = rollout_of(run, prompts, step)
        lengths = {len(one.response_ids) for one in rollout.sequences}
        assert len(lengths) > 1, "responses of one length have no padding to be confused by"
        expected = plain.step(rollout.sequences, rollout.scores, progress.leash["beta"])
        progress = one_step(run, prompts, progress, None)
        assert 0 < expected["policy/clip_share"] < 1 and 0 < expected["value/clip_share"] < 1
        for name, value in expected.items():
            assert progress.metrics[name] == pytest.approx(value, rel=1e-9), name
    assert all(weight.grad is None for weight in run.networks.parameters()), "nothing is left over"
    trained = {name: weight for name, weight in run.networks.named_parameters() if weight.requires_grad}
    assert trained.keys() == plain.trained.keys()
    for name, weight in trained.items():
        torch.testing.assert_close(
            weight, plain.trained[name], rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )
