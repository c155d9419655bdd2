"""What TRL's trainers read is what the policy drew: without dropout, at the positions where it was drawn."""

import json

import pytest
import torch
from tiny_models import TEMPLATE, save_tiny
from transformers import AutoModelForCausalLM
from trl_batches import TRL_MARKS

from kleash.models import load_pair, read_prompts
from kleash.records import DistillJob, GRPOJob, RLOOJob, read_steps
from kleash.training.run_log import RunLog

pytestmark = TRL_MARKS
HEROINE = "kleash.training.example_rewards:heroine"
PROMPTS = ("The sea was calm and the boat went out before", "She", "A long road leads out")
SMALL = {"prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 12, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """GPT-2s, which drop out a tenth and have learned positions, and often end."""
    root = tmp_path_factory.mktemp("gpt2")
    for name, seed in (("policy", 0), ("reference", 1)):
        network = AutoModelForCausalLM.from_pretrained(save_tiny(root / name, "gpt2", seed=seed))
        with torch.no_grad():
            network.transformer.ln_f.bias.fill_(1.0)
            network.transformer.wte.weight[1] = 0.18
        network.save_pretrained(root / name)
        (root / name / "chat_template.jinja").write_text("{{ tools and tools[0].name }}: " + TEMPLATE)
    (root / "prompts.txt").write_text("\n".join(PROMPTS))
    return root


def step_of(train, kind, pair, out, **more):
    """The first step of a run."""
    out.mkdir()
    names = {"policy": str(pair / "policy"), "prompts": str(pair / "prompts.txt"), "out": str(out)}
    job = kind(**{"steps": 1, **names, **SMALL, **more})
    train(job, RunLog(out, job))
    (step,) = read_steps(out)
    return step


def batches_of(trl, monkeypatch):
    """The list to which each batch is added that a trainer generates."""
    seen, generate = [], trl.online.TokenPromptsMixin._generate_and_score_completions

    def spy(self, inputs):
        seen.append(generate(self, inputs))
        return seen[-1]

    monkeypatch.setattr(trl.online.TokenPromptsMixin, generate.__name__, spy)
    return seen


def dense(folder, batch):
    """Log-probabilities of a padded batch's responses, one text at a time, in float64."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids, mask = (
        torch.cat([batch[f"prompt_{what}"], batch[f"completion_{what}"]], dim=1) for what in ("ids", "mask")
    )
    texts = zip(ids, mask.bool(), batch["completion_mask"].sum(-1), strict=True)
    with torch.no_grad():
        return [
            network(row[keep][None]).logits[0, -length - 1 : -1].log_softmax(-1)
            for row, keep, length in texts
        ]


def sums_of(policy, reference, batches):
    """Of all responses' tokens: KL(policy || reference), entropy, how many."""
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        for logp, logq in zip(dense(policy, batch), dense(reference, batch), strict=True):
            p = logp.exp()
            sums += torch.tensor([(p * (logp - logq)).sum(), -(p * logp).sum(), len(logp)])
    return sums.tolist()


@pytest.mark.parametrize("kind", [GRPOJob, RLOOJob])
def test_kl_with_dropout_and_position_embeddings(trl, pair, tmp_path, monkeypatch, kind):
    seen = batches_of(trl, monkeypatch)
    job = {"reward": (HEROINE,), "reference": str(pair / "reference")}
    step = step_of(trl.train_online, kind, pair, tmp_path / "run", **job)
    nats, _, tokens = sums_of(pair / "policy", pair / "reference", seen)
    assert not seen[0]["prompt_mask"].all(), "or nothing was padded"
    assert step.metrics["kl/exact_per_token"] == pytest.approx(nats / tokens, rel=1e-5)
    saved = json.loads((tmp_path / "run" / "policy" / "config.json").read_text())
    assert saved["resid_pdrop"] == 0.1, "what others do with the policy is theirs to say"


@pytest.mark.parametrize("kind", [GRPOJob, RLOOJob, DistillJob])
def test_prompts_are_read_as_kleash_renders_them_and_a_policy_has_kl_0_to_itself(
    trl, pair, tmp_path, monkeypatch, kind
):
    """TRL knows neither a record's tools nor token ids; and weights are those of float32 and of bfloat16."""
    own, prompts = str(pair / "policy"), tmp_path / "p.jsonl"
    parts = '[{"role": "user", "content": [{"type": "text", "text": "She"}]}]'
    tools = f'{{"messages": {parts}, "tools": [{{"name": "sea"}}]}}'
    prompts.write_text(tools + '\n{"prompt_token_ids": [40, 41, 42]}\n{"prompt": "She"}\n')
    expected = [prompt.token_ids for prompt in read_prompts(str(prompts), load_pair(own, own))]
    seen = batches_of(trl, monkeypatch)
    more = {"teacher": own} if kind is DistillJob else {"reward": (HEROINE,)}
    train = trl.train_distill if kind is DistillJob else trl.train_online
    step = step_of(train, kind, pair, tmp_path / "run", prompts=str(prompts), dtype="bfloat16", **more)
    rows = zip(seen[0]["prompt_ids"], seen[0]["prompt_mask"].bool(), strict=True)
    assert {tuple(ids[mask].tolist()) for ids, mask in rows} == {*expected} and len(expected) == 3
    assert step.metrics["teacher/divergence" if kind is DistillJob else "kl/exact_per_token"] == 0


def test_distillation_averages_over_tokens_and_not_micro_batches(trl, pair, tmp_path, monkeypatch):
    seen = []
    compute = trl.distillation.DistillationMixin._compute_loss

    def spy(self, model, inputs, *more):
        seen.append(inputs)
        return compute(self, model, inputs, *more)

    monkeypatch.setattr(trl.distillation.DistillationMixin, "_compute_loss", spy)
    job = {"teacher": str(pair / "reference"), "batch_tokens": 70}
    step = step_of(trl.train_distill, DistillJob, pair, tmp_path / "run", **job)
    nats, entropy, tokens = sums_of(pair / "policy", pair / "reference", seen)
    lengths = {int(batch["completion_mask"].sum()) for batch in seen}
    assert len(seen) > 1 and len(lengths) > 1, "or means of means are the mean"
    assert step.metrics["teacher/divergence"] == pytest.approx(nats / tokens, rel=1e-5)
    assert step.metrics["policy/entropy"] == pytest.approx(entropy / tokens, rel=1e-5)


def test_attention_dropout_is_switched_off(trl, tmp_path):
    from kleash.training.networks import disable_dropout, skip_padding_in_positions

    folder = save_tiny(tmp_path / "llama", "llama", attention_dropout=0.5)
    network = load_pair(str(folder), str(folder)).policy.network.train()
    ids = torch.arange(12)[None]
    assert not torch.equal(network(ids).logits, network(ids).logits)
    disable_dropout(network)
    assert torch.equal(network(ids).logits, network(ids).logits)
    mask = (ids > 2).long()
    before = network(ids, attention_mask=mask).logits[:, 3:]
    after = skip_padding_in_positions(network)(ids, attention_mask=mask).logits[:, 3:]
    torch.testing.assert_close(after, before, msg="a rotary embedding does not mind padding")
    folder, ids = str(save_tiny(tmp_path / "gpt2", "gpt2")), torch.arange(129)[None]  # of 128 positions
    network = load_pair(folder, folder).policy.network
    before = network(ids[:, :128]).logits
    after = skip_padding_in_positions(network)(ids, attention_mask=ids >= 0).logits[:, :128]
    torch.testing.assert_close(after, before, msg="the last token of a response stands beyond the context")
