"""The loss of a whole step, against plain float64: one sequence at a time, all logits, loops over tokens."""

import math

import pytest
import torch
from ppo_cases import ready, rollout_of, tiny_job
from transformers import AutoModelForCausalLM

from kleash.training.ppo import learn
from kleash.training.ppo_loss import learning_signals

KINDS = [
    ("exact", "loss", "token"),
    ("exact", "loss", "sequence"),
    ("exact", "reward", "sequence"),
    ("k2", "loss", "token"),
    ("k3", "loss", "token"),
    ("k3", "loss", "sequence"),
    ("k1", "loss", "token"),
    ("k1", "loss", "sequence"),
    ("k1", "reward", "sequence"),
]


class Plain:
    """PPO as the papers write it: every sequence alone, without padding, nothing of kleash's arithmetic."""

    def __init__(self, job, sequences, scores, minibatches):
        self.job, self.sequences, self.scores = job, sequences, scores
        self.reference = AutoModelForCausalLM.from_pretrained(job.reference_name, dtype=torch.float64).eval()
        self.tokens = sum(len(one.response_ids) for one in sequences)
        self.minibatches = minibatches

    def read(self, network, value, one):
        """Log-probabilities of every token at each place a response token is drawn, and the critic's values."""
        ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
        out = network(input_ids=ids, output_hidden_states=True)
        places = slice(len(one.prompt_ids) - 1, ids.shape[1] - 1)
        logp = (out.logits[0, places] / self.job.temperature).log_softmax(-1)
        hidden = out.hidden_states[-1][0, places].detach()  # the critic moves nothing but itself
        return logp, (hidden @ value.weight.T + value.bias)[:, 0]

    def remember(self, network, value):
        """Old log-probabilities, KLs, values; advantages from rewards by loops over the tokens."""
        job, beta = self.job, self.job.beta
        self.old, self.gae, self.returns, self.led = [], [], [], []
        with torch.no_grad():
            for one, score in zip(self.sequences, self.scores, strict=True):
                logp, values = self.read(network, value, one)
                logq, _ = self.read(self.reference, value, one)
                drawn = torch.tensor(one.response_ids)[:, None]
                u = (logp - logq).gather(1, drawn)[:, 0].tolist()
                exact = (logp.exp() * (logp - logq)).sum(-1).tolist()
                cost = (
                    exact if job.kl == "exact" else u if job.kl == "k1" else [math.exp(-x) - 1 + x for x in u]
                )
                length = len(u)
                rewards = [0.0] * length
                rewards[-1] += float(score)
                if job.kl_place == "reward":
                    for t in range(length):
                        later = job.gamma * exact[t + 1] if t + 1 < length else 0.0
                        rewards[t] -= beta * (u[t] if job.kl == "k1" else later)
                gae, running = [0.0] * length, 0.0
                for t in reversed(range(length)):
                    following = values[t + 1].item() if t + 1 < length else 0.0
                    delta = rewards[t] + job.gamma * following - values[t].item()
                    running = delta + job.gamma * job.gae_lambda * running
                    gae[t] = running
                self.old.append((logp.gather(1, drawn)[:, 0], values))
                self.gae.append(gae)
                self.returns.append([a + v for a, v in zip(gae, values.tolist(), strict=True)])
                self.led.append([sum(cost[t + 1 :]) for t in range(length)])
        if job.kl_place == "loss" and job.kl_scope == "sequence":
            for row, gae in enumerate(self.gae):
                for t in range(len(gae)):
                    others = [led[t] for other, led in enumerate(self.led) if other != row and t < len(led)]
                    mean = sum(others) / len(others) if others else 0.0
                    gae[t] -= beta * (self.led[row][t] - mean)
        self.price = beta
        if job.whiten:
            flat = torch.tensor([a for gae in self.gae for a in gae], dtype=torch.float64)
            self.price = beta / flat.std().item()
            self.gae = [[(a - flat.mean().item()) / flat.std().item() for a in gae] for gae in self.gae]

    def loss(self, network, value, rows):
        job, total = self.job, 0.0
        self.told = dict.fromkeys(
            ("ratio", "update_kl", "clipped", "value_clipped", "value_loss", "tokens"), 0.0
        )
        for row in rows:
            one = self.sequences[row]
            logp, values = self.read(network, value, one)
            with torch.no_grad():
                logq, _ = self.read(self.reference, value, one)
            old_logp, old_values = self.old[row]
            for t, token in enumerate(one.response_ids):
                ratio = (logp[t, token] - old_logp[t]).exp()
                a = self.gae[row][t]
                total = total - torch.minimum(
                    ratio * a, ratio.clamp(1 - job.clip_range, 1 + job.clip_range) * a
                )
                total = total + job.ent_coef * (logp[t].exp() * logp[t]).sum()
                u = logp[t, token] - logq[t, token]
                if job.kl == "exact":
                    total = total + self.price * (logp[t].exp() * (logp[t] - logq[t])).sum()
                elif job.kl_place == "loss":  # the gradient that matters: ratio u on log p
                    total = total + self.price * (ratio * u).detach() * logp[t, token]
                error = (values[t] - self.returns[row][t]) ** 2
                near = old_values[t] + (values[t] - old_values[t]).clamp(
                    -job.clip_range_value, job.clip_range_value
                )
                error = torch.maximum(error, (near - self.returns[row][t]) ** 2)
                total = total + job.vf_coef * error / 2
                r = ratio.item()
                self.told["tokens"] += 1
                self.told["ratio"] += r
                self.told["update_kl"] += r - 1 - math.log(r)
                self.told["clipped"] += (r > 1 + job.clip_range and a > 0) or (
                    r < 1 - job.clip_range and a < 0
                )
                self.told["value_clipped"] += abs((values[t] - old_values[t]).item()) > job.clip_range_value
                self.told["value_loss"] += error.item() / 2
        return total / (self.tokens / self.minibatches)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ppo-loss")


@pytest.mark.parametrize(("kl", "place", "scope"), KINDS, ids=["-".join(kind) for kind in KINDS])
def test_minibatch_gradient_matches_plain_formulas(folder, kl, place, scope):
    """Off the policy that drew the tokens, with a critic that has learnt something, clipped and not."""
    whiten = (kl, scope) != ("exact", "token")
    job = tiny_job(
        folder,
        dtype="float64",
        kl=kl,
        kl_place=place,
        kl_scope=scope,
        beta=0.3,
        whiten=whiten,
        ent_coef=0.01,
        temperature=0.7,
        gae_lambda=0.9,
        gamma=0.97,
        clip_range=0.1,
        clip_range_value=0.02,
        samples_per_prompt=2,
        seed=3,
    )
    run, prompts = ready(job)
    policy = run.networks
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        policy.value.weight.copy_(torch.randn(policy.value.weight.shape, generator=generator) * 0.1)
    rollout = rollout_of(run, prompts)
    lengths = {len(one.response_ids) for one in rollout.sequences}
    assert len(lengths) > 1, "responses of one length have no padding to be confused by"
    plain = Plain(job, rollout.sequences, rollout.scores, job.minibatches)
    plain.remember(policy.network, policy.value)
    with torch.no_grad():
        for weight in run.trained:
            weight.add_(0.01 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator))
    shaped = learning_signals(rollout, job, job.beta)
    assert shaped.scaled_beta == pytest.approx(plain.price, rel=1e-9)
    tokens = rollout.mask.sum().item()
    found = learn(run, rollout, shaped, rollout.minibatches[0], job.minibatches / tokens)
    trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    ours = {name: weight.grad.clone() for name, weight in trained.items()}
    policy.zero_grad()
    rows = [row for batch in rollout.minibatches[0] for row in batch.rows]
    assert len(rollout.minibatches[0]) > 1 and len(rows) == 4
    plain.loss(policy.network, policy.value, rows).backward()
    for name, value in plain.told.items():
        assert found[name] == pytest.approx(value, rel=1e-7, abs=1e-12), name
    assert 0 < found["clipped"] < found["tokens"] and 0 < found["value_clipped"] < found["tokens"]
    for name, weight in trained.items():
        assert weight.grad.abs().max() > 0
        torch.testing.assert_close(
            ours[name], weight.grad, rtol=1e-7, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )
