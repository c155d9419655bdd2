"""``kleash train distill``: its losses against float64 enumeration, and runs on given responses, which agree."""

import json
from shutil import copytree
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scoring_cases import sequence_of
from tiny_models import double_logits, edit_json, save_tiny, tiny_tokenizer
from torch.autograd import grad
from trl_batches import TRL_MARKS

from kleash.divergences import DIVERGENCES
from kleash.errors import ChangedInputError, ModelError, OptionError, SourceError
from kleash.jobs.algorithms import DISTILLATION_DIVERGENCES
from kleash.linear import Head
from kleash.measuring import CacheJob, cache_reference
from kleash.models import StoredReference, load_pair, read_responses
from kleash.records import DistillJob, read_steps
from kleash.sources.responses import LISTS, check_lists
from kleash.training.run_log import RunLog

pytestmark = TRL_MARKS
PROMPTS = ("The sea was calm", "She", "A long road leads out of", "When")
TOKENS, WORDS, TEMPERATURE, WEIGHT = 5, 11, 1.3, torch.tensor(0.25)


@pytest.fixture(scope="module")
def distill(trl):
    return trl.distillation


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A policy, teachers with as many and with more rows, a file of responses, and the caches of the teachers."""
    root = tmp_path_factory.mktemp("distil")
    save_tiny(root / "policy", seed=0)
    save_tiny(root / "teacher", "gemma2", seed=1)  # its logits are capped
    save_tiny(root / "padded", seed=2, vocab_size=384)
    tokenizer, draw = tiny_tokenizer(), np.random.default_rng(0)
    with (root / "responses.jsonl").open("w") as file:
        for prompt in PROMPTS:
            ids = tokenizer(prompt)["input_ids"]
            drawn = draw.integers(3, 300, size=draw.integers(2, 9)).tolist()
            file.write(json.dumps({"prompt_token_ids": ids, "response_token_ids": drawn}) + "\n")
    for name in ("teacher", "padded"):
        source = {"reference": str(root / name), "responses": str(root / "responses.jsonl")}
        cache_reference(CacheJob(**source, out=str(root / f"cache-{name}")))
    return root


def records(root):
    return [json.loads(line) for line in (root / "responses.jsonl").read_text().splitlines()]


def with_lists(root, k, *, temperature=1.0, **more):
    """A file of the responses with the teacher's k likeliest tokens, from its own logits in float64."""
    path = root / f"lists-{k}.jsonl"
    with path.open("w") as file:
        for record in records(root):
            top = dense(root / "teacher", record, temperature).topk(k)
            lists = {"teacher_ids": top.indices.tolist(), "teacher_logprobs": top.values.tolist()}
            file.write(json.dumps({**record, **lists, **more}) + "\n")
    return path


def dense(folder, record, temperature=1.0, words=320):
    """Log-probabilities of a response's positions, in float64, over the first rows of the head."""
    prompt, response = record["prompt_token_ids"], record["response_token_ids"]
    logits = double_logits(folder, prompt + response)[len(prompt) - 1 : -1, :words]
    return (logits / temperature).log_softmax(-1)


def run(distill, root, out, **options):
    """A run on the given responses: the steps, and the policy's weights."""
    options = {"teacher_cache": str(root / "cache-teacher")} | options
    options = {"policy": str(root / "policy"), "responses": str(root / "responses.jsonl")} | options
    job = DistillJob(**{"prompts_per_step": 2, "learning_rate": 1e-2, "steps": 3, "out": str(out)} | options)
    out.mkdir(exist_ok=True)
    result = distill.train_distill(job, RunLog(out, job))
    return read_steps(out), load_pair(result.policy, result.policy).policy.network.state_dict()


def metric(steps, name="teacher/divergence"):
    return [step.metrics[name] for step in steps]


MIX = {"jensen_shannon": 0.5, "skew_kl": 0.1, "skew_reverse_kl": 0.1}  # without --mix


def by_hand(name, p, q, mix=0.3):
    """D(p || q) of each row as defined, p the teacher."""

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    def mixed(a, b, share):
        return share * a + (1 - share) * b

    return {
        **dict.fromkeys(("policy_teacher", "reverse_kl"), lambda: kl(q, p)),
        **dict.fromkeys(("teacher_policy", "kl"), lambda: kl(p, q)),
        "jeffreys": lambda: kl(p, q) + kl(q, p),
        "jensen_shannon": lambda: mix * kl(p, mixed(p, q, mix)) + (1 - mix) * kl(q, mixed(p, q, mix)),
        "skew_kl": lambda: kl(p, mixed(p, q, mix)),
        "skew_reverse_kl": lambda: kl(q, mixed(q, p, mix)),
        "chi_squared": lambda: ((p - q) ** 2 / q).sum(-1),
        "total_variation": lambda: (p - q).abs().sum(-1) / 2,
        "hellinger": lambda: ((p.sqrt() - q.sqrt()) ** 2).sum(-1).div(2).sqrt(),
    }[name]()


@pytest.fixture
def sides():
    """Hidden states and heads of a policy of width 6 and a teacher of width 4: (policy, teacher)."""
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(TOKENS, dim, generator=draw), torch.randn(WORDS, dim, generator=draw)) for dim in (6, 4)
    ]


def distribution(side):
    return (side[0] @ side[1].T / TEMPERATURE).softmax(-1)


@pytest.mark.parametrize("name,mix", [(x, None) for x in DISTILLATION_DIVERGENCES] + [(x, 0.3) for x in MIX])
def test_loss_of_hidden_states_is_the_enumerated_divergence_with_its_gradient(distill, sides, name, mix):
    record = distill.divergence_of(DistillJob(divergence=name, mix=mix))
    policy, teacher = ([x.clone().requires_grad_() for x in sides[0]], sides[1])
    loss, per_token, entropy = distill.loss_of_states(
        (policy[0], Head(policy[1])), (teacher[0], Head(teacher[1])), WEIGHT, record, TEMPERATURE
    )
    exact = [x.double().requires_grad_() for x in sides[0]]
    q, p = distribution(exact), distribution([x.double() for x in teacher])
    expected = by_hand(name, p, q, mix or MIX.get(name))
    torch.testing.assert_close(per_token.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), -(q * q.log()).sum(-1).detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.double(), (0.25 * expected).sum(), rtol=1e-5, atol=1e-6)
    for got, right in zip(grad(loss, policy), grad(0.25 * expected.sum(), exact), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-5)
    assert not per_token.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jensen_shannon"])
def test_loss_of_lists_is_that_of_the_coarse_distributions_a_few_tokens_at_a_time(
    distill, sides, name, monkeypatch
):
    monkeypatch.setattr(distill, "LISTED_LOGITS", 2 * WORDS)
    exact = [x.double().requires_grad_() for x in sides[0]]
    p, q = distribution([x.double() for x in sides[1]]), distribution(exact)
    ids = [p[:3].topk(4).indices, p[3:].topk(2).indices]  # two responses, of which each has a k of its own
    responses = [
        sequence_of(
            (1,),
            (2,) * len(tokens),
            sample_id=number,
            columns={
                "teacher_ids": tokens.numpy(),
                "teacher_logprobs": rows.gather(-1, tokens).log().float().numpy(),
            },
        )
        for number, (tokens, rows) in enumerate(zip(ids, (p[:3], p[3:]), strict=True))
    ]
    policy = [x.clone().requires_grad_() for x in sides[0]]
    record = distill.divergence_of(DistillJob(divergence=name, mix=0.3 if name == "jensen_shannon" else None))
    loss, per_token, entropy = distill.loss_of_lists(
        (policy[0], Head(policy[1])), responses, WEIGHT, record, TEMPERATURE
    )

    def coarse(rows, tokens):
        listed = rows.gather(-1, tokens)
        return torch.cat([listed, 1 - listed.sum(-1, keepdim=True)], -1)

    parts = [
        by_hand(name, coarse(a, tokens), coarse(b, tokens))
        for a, b, tokens in ((p[:3], q[:3], ids[0]), (p[3:], q[3:], ids[1]))
    ]
    expected = torch.cat(parts)
    torch.testing.assert_close(per_token.double(), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(q * q.log()).sum(-1).detach(), rtol=1e-5, atol=1e-6)
    for got, right in zip(grad(loss, policy), grad(0.25 * expected.sum(), exact), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-3, atol=1e-4)


def test_a_cache_trains_as_its_teacher_does(distill, root, tmp_path, monkeypatch):
    """Divergences before the first update are those of float64 logits; then a response at a time is as all at once."""
    steps, weights = run(distill, root, tmp_path / "live", teacher=str(root / "teacher"), teacher_cache=None)
    monkeypatch.setenv("HOME", str(root))
    again, cached = run(distill, root, tmp_path / "one", teacher_cache="~/cache-teacher", batch_tokens=1)
    np.testing.assert_allclose(metric(steps), metric(again), rtol=1e-5)
    for name in weights:
        torch.testing.assert_close(weights[name], cached[name], rtol=1e-4, atol=1e-5)
    one = run(distill, root, tmp_path / "all", steps=1, prompts_per_step=4, dtype="float64")[0]
    nats, entropies, tokens = [], [], []
    for record in records(root):
        logq, logp = dense(root / "policy", record), dense(root / "teacher", record)
        nats.append(float((logq.exp() * (logq - logp)).sum()))
        entropies.append(float(-(logq.exp() * logq).sum()))
        tokens.append(len(logq))
    mean = sum(nats) / sum(tokens)
    assert metric(one) == pytest.approx([mean], rel=1e-5)
    assert metric(one, "policy/entropy") == pytest.approx([sum(entropies) / sum(tokens)], rel=1e-5)
    residuals = np.array(nats) - mean * np.array(tokens)
    error = np.sqrt((residuals**2).sum() * 4 / 3) / sum(tokens)
    assert metric(one, "teacher/divergence_error") == pytest.approx([error], rel=1e-4)
    assert metric(one, "response/prompts") == [4.0] and "response/cut_share" not in one[0].metrics


def test_lists_of_all_tokens_train_as_the_cache_and_shorter_ones_bound_it(distill, root, tmp_path):
    options = {"steps": 2, "prompts_per_step": 4, "divergence": "skew_reverse_kl", "temperature": 1.5}
    steps, weights = run(distill, root, tmp_path / "cached", **options)
    values = {}
    for k in (320, 8, 2):
        given = {"responses": str(with_lists(root, k, temperature=1.5)), "teacher_cache": None}
        listed, found = run(distill, root, tmp_path / f"{k}", **given, **options)
        values[k] = metric(listed)[0]
        if k == 320:
            np.testing.assert_allclose(metric(steps), metric(listed), rtol=1e-4)
            assert all(torch.allclose(weights[x], found[x], rtol=1e-3, atol=1e-4) for x in weights)
    assert 0 < values[2] < values[8] < metric(steps)[0]


def test_heads_of_different_sizes_are_cut_to_the_tokens(distill, root, tmp_path):
    q, p = ([dense(root / x, y, words=300).exp() for y in records(root)] for x in ("policy", "padded"))
    nats = float(by_hand("reverse_kl", torch.cat(p), torch.cat(q)).mean())
    for options in ({}, {"teacher": str(root / "padded"), "teacher_cache": None}):
        cache = {"teacher_cache": str(root / "cache-padded"), "lora_rank": 2} | options
        (step,), _ = run(distill, root, tmp_path / str(len(options)), steps=1, prompts_per_step=4, **cache)
        assert step.metrics["teacher/divergence"] == pytest.approx(nats, rel=1e-5)
    drawn = {"responses": None, "prompts": "shipped:prompts", "max_new_tokens": 8, "limit": 4}
    models = {"policy": str(root / "padded"), "teacher": str(root / "policy"), "teacher_cache": None}
    run(distill, root, tmp_path / "drawn", **models, **drawn)  # the teacher embeds no rows beyond its own


def test_sampled_tail_reads_the_drawn_tokens(distill, root, tmp_path):
    """With lists of all tokens nothing is outside, so that both tails are the whole divergence."""
    path, drawn = with_lists(root, 320), tmp_path / "drawn.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [{**line, "logprobs": [-3.0] * len(line["response_token_ids"])} for line in lines]
    drawn.write_text("\n".join(map(json.dumps, lines)))
    options = {"teacher_cache": None, "steps": 1, "divergence": "kl", "tail": "sampled"}
    sampled, _ = run(distill, root, tmp_path / "sampled", responses=str(drawn), **options)
    whole, _ = run(distill, root, tmp_path / "whole", steps=1, divergence="kl")
    assert metric(sampled) == pytest.approx(metric(whole), rel=1e-4)
    with pytest.raises(SourceError, match="expected 'logprobs', with which the teacher drew"):
        run(distill, root, tmp_path / "none", responses=str(path), **options)


def test_run_on_given_responses_resumes_bit_for_bit(distill, root, tmp_path):
    options = {"steps": 4, "checkpoint_every": 2, "divergence": "jensen_shannon", "batch_tokens": 16}
    steps, weights = run(distill, root, tmp_path / "whole", **options)
    run(distill, root, tmp_path / "parts", **{**options, "steps": 2})
    again, resumed = run(distill, root, tmp_path / "parts", resume=True, **options)
    assert [step.step for step in again] == [1, 2, 3, 4] and metric(again) == metric(steps)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_what_cannot_teach_is_refused(distill, root, tmp_path):
    stored = StoredReference(copytree(root / "cache-teacher", tmp_path / "cache"))
    (part,) = stored.folder.glob("part-*")
    part.write_bytes(part.read_bytes()[:-4] + bytes(4))
    pair = load_pair(*2 * [str(root / "policy")])
    with pytest.raises(ChangedInputError, match="was written to while it was in use"):
        stored.read(list(read_responses(str(root / "responses.jsonl"), pair)))
    other = save_tiny(root / "other", seed=1)
    edit_json(other / "config.json", num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"^the teacher .* lacks 9 of its weights"):
        run(distill, root, tmp_path / "a", teacher=str(other), teacher_cache=None)
    tiny_tokenizer(290).save_pretrained(other)
    with pytest.raises(ModelError, match=r"differ .*\(the reference is the teacher here\); TRL's GOLD"):
        run(distill, root, tmp_path / "a", teacher=str(other), teacher_cache=None)
    more = tmp_path / "more.jsonl"
    extra = {"prompt": "She", "response_token_ids": [9, 9]}
    more.write_text((root / "responses.jsonl").read_text() + json.dumps(extra) + "\n")
    with pytest.raises(
        ModelError, match=r"lacks 1 of the 5 responses of .*more\.jsonl, the first being prompt"
    ):
        run(distill, root, tmp_path / "b", responses=str(more))
    with pytest.raises(SourceError, match=r"responses.jsonl, line 1: expected .*'teacher_ids'"):
        run(distill, root, tmp_path / "c", teacher_cache=None)
    first = json.loads(with_lists(root, 2).read_text().splitlines()[0])
    more.write_text(json.dumps({**first, "teacher_logprobs": [[-0.1, -0.1] for _ in first["teacher_ids"]]}))
    with pytest.raises(SourceError, match="line 1: the probabilities in the list of response token 1 sum to"):
        run(distill, root, tmp_path / "d", responses=str(more), teacher_cache=None)
    networks = SimpleNamespace(pair=load_pair(*2 * [str(root / "policy")]))
    for reason, told in (("stop", []), (None, [distill.NO_END])):
        more.write_text(json.dumps({"prompt": "She", "response": " was", "finish_reason": reason}))
        job = DistillJob(policy="p", teacher="t", responses=str(more))
        assert distill.read_given(job, networks, None)[1] == told


@pytest.mark.parametrize(
    "change",
    [
        {"teacher_ids": [[3, 3], [4, 5]]},
        {"teacher_ids": [[3, 4], [4]]},
        {"teacher_ids": [[3, 4], [4, 320]]},
        {"teacher_ids": [[3, 4]]},
        {"teacher_ids": None},
        *({"teacher_logprobs": [[x, -1.0], [-1.0, -2.0]]} for x in (0.1, None, np.nan, -np.inf, -9999)),
        {"teacher_logprobs": [[-1.0], [-1.0]]},
    ],
)
def test_lists_that_would_train_something_else_are_refused(root, tmp_path, change):
    pair = load_pair(str(root / "policy"), str(root / "policy"))
    good = {"teacher_ids": [[3, 4], [4, 5]], "teacher_logprobs": [[-1.0, -2.0], [-1.0, -2.0]]}
    record = {"prompt": "She", "response_token_ids": [7, 8], **good}
    ragged = record | {"teacher_ids": [[3], [4, 5]], "teacher_logprobs": [[-1.0], [-1.0, -2.0]]}
    (tmp_path / "good.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(ragged))
    read, padded = read_responses(str(tmp_path / "good.jsonl"), pair, with_lists=True)
    assert read.columns["teacher_ids"].tolist() == good["teacher_ids"]
    assert [x.tolist() for x in padded.columns.values()] == [[[3, -1], [4, 5]], [[-1, -np.inf], [-1, -2]]]
    (tmp_path / "bad.jsonl").write_text(json.dumps(record | change))
    is_twice = change == {"teacher_ids": [[3, 3], [4, 5]]}
    reason = "the token 3 twice in the list of response token 1" if is_twice else "for each of the 2 tokens"
    with pytest.raises(SourceError, match=f"line 1: .*{reason}"):
        list(read_responses(str(tmp_path / "bad.jsonl"), pair, with_lists=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"teacher_cache": "c"}, "give those as --responses, or a --teacher"),
        ({"responses": "r", "teacher_cache": "c", "teacher": "t"}, "leave --teacher out"),
        ({"responses": "r", "prompts": "p"}, "--prompts is for responses that the policy draws"),
        ({"responses": "r", "max_new_tokens": 9}, "--max-new-tokens is for responses"),
        ({"tail": "sampled"}, "--tail sampled is for lists of the teacher's likeliest tokens"),
        ({"responses": "r", "tail": "sampled", "divergence": "hellinger"}, "cannot estimate hellinger"),
        ({"reference": "r"}, "the model that it learns from is --teacher"),
        ({"mix": 1.0}, "--mix must be a number between 0 and 1; it is 1.0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, said):
    with pytest.raises(OptionError, match=said):
        DistillJob(**options)
    assert set(DIVERGENCES) < set(DISTILLATION_DIVERGENCES)
    said = "--mix does nothing with --divergence kl, which has no mixture"
    assert DistillJob(divergence="kl", mix=0.2).without_effect() == (said,)


@pytest.mark.parametrize(
    ("form", "of_given", "of_drawn"),
    [
        *((form, "", "") for form in ("spread out", "sure")),
        ("normalised", "every list has the whole probability", "and of draws from the teacher 0 would"),
        ("previous", "r: of 600 lists, ", "so they are of the previous position"),
        ("next", "r: of 600 lists, ", "so they are of the next position"),
        ("appended", "", "r: 0 of 600 response tokens are outside their lists"),
    ],
)
def test_lists_that_are_hardly_those_of_the_teacher_are_told(form, of_given, of_drawn):
    draw = torch.Generator().manual_seed(0)
    logp = torch.randn(10, 60, 320, generator=draw).mul(300 if form == "sure" else 3).log_softmax(-1)
    tokens = torch.multinomial(logp.exp().flatten(0, 1), 1, generator=draw).view(10, 60, 1)
    ids = (logp.scatter(-1, tokens, 1.0) if form == "appended" else logp).topk(8).indices
    listed = logp.gather(-1, ids)
    columns = ids, listed.log_softmax(-1) if form == "normalised" else listed
    columns = [x.roll({"previous": 1, "next": -1}.get(form, 0), 1).numpy() for x in columns]
    responses = [
        sequence_of((1,), row.tolist(), logp_sampled=0, columns=dict(zip(LISTS, lists, strict=True)))
        for row, *lists in zip(tokens[..., 0], *columns, strict=True)
    ]
    for drawn_at, said in ((None, of_given), (1.0, of_drawn)):
        try:
            told = "".join(check_lists(responses, "r", vocab_size=320, drawn_at=drawn_at))
        except SourceError as error:
            told = str(error)
        assert said in told and bool(said) == bool(told)
