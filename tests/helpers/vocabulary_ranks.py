"""What four processes check about heads that they have between them; ``vocabulary_ranks.py STORE FOLDER [CHECK …]``."""

import sys
from contextlib import contextmanager

import pytest
import torch
import torch._dynamo  # what torch imports when it is needed first, once for all ranks
import torch.distributed as dist
from forked_ranks import fork_ranks
from rank_checks import (
    CHUNKS,
    CUTS,
    GROUPS,
    REFERENCE,
    TEXTBOOK,
    TOKENS,
    WORDS,
    check,
    gradients_agree,
    local_rows,
    logp,
    made,
    main,
    models,
    refused,
)
from stored_ranks import stored
from torch.testing import assert_close

from kleash.divergences import skew_kl_record
from kleash.linear import (
    Head,
    LinearOptions,
    TokenStatistics,
    linear_divergence,
    linear_divergence_loss,
    linear_kl,
    linear_kl_loss,
    linear_objective,
    log_probabilities,
    token_statistics,
)

RECORDS = {"skew": skew_kl_record(0.1)}


@check(2, 4)
def every_divergence_equals_the_textbook(split):
    temperature, weights = torch.linspace(0.5, 1.5, TOKENS).double(), torch.linspace(-1, 2, TOKENS).double()
    weights[4] = 0
    traits = {"softcap": 4.0, "scale": 1.3}
    for name in TEXTBOOK if split.size == 2 else ("kl", "total_variation"):
        textbook, right = TEXTBOOK[name], local_rows(made(), slice(None))
        value = textbook(*(logp(side, temperature) for side in models(right, **traits)))
        (value * weights).sum().backward()
        for options in (None, REFERENCE, CHUNKS) if name == "hellinger" else (CHUNKS,):
            arguments = {
                "divergence": RECORDS.get(name, name),
                "temperature": temperature,
                "options": options,
            }
            for at_once in (False, True):
                mine = local_rows(made(), split.rows)
                p, q = models(mine, split.group, **traits)
                if at_once:
                    loss, actual = linear_divergence_loss(*p, *q, weights=weights, **arguments)
                    value_ = torch.where(weights != 0, value, 0.0)
                else:
                    actual, value_ = linear_divergence(*p, *q, **arguments), value
                    loss = (actual * weights).sum()
                assert_close(actual.detach(), value_.detach(), msg=lambda m, name=name: f"{name}: {m}")
                loss.backward()
                split.same(actual.detach())
                split.same(mine[0].grad)
                gradients_agree(mine, right, split.rows)


@check(2)
def statistics_are_of_the_whole_vocabulary(split):
    for forbidden in (False, True):
        tensors = made(forbidden=forbidden)
        # twins on different ranks, some of them the likeliest
        tensors[1][[5, 30]], tensors[2][[5, 30]] = 0.0, 4.0
        tokens = torch.tensor([5, 30, 0, 8, 9, 10, 23, 24, 36, 12, 3])
        lp, lq = (logp(side) for side in models(tensors))
        ids = tokens[:, None]
        kl_pq, kl_qp = (
            torch.where(x.exp() > 0, x.exp() * (x - y).nan_to_num(), 0.0).sum(-1)
            for x, y in ((lp, lq), (lq, lp))
        )
        entropy_p, entropy_q = (-(x.exp() * x.nan_to_num(neginf=0.0)).sum(-1) for x in (lp, lq))
        expected = TokenStatistics(
            token_logp=lp.gather(-1, ids)[:, 0],
            token_logq=lq.gather(-1, ids)[:, 0],
            kl_pq=kl_pq,
            kl_qp=kl_qp,
            jensen_shannon=TEXTBOOK["jensen_shannon"](lp, lq),
            total_variation=TEXTBOOK["total_variation"](lp, lq),
            entropy_p=entropy_p,
            entropy_q=entropy_q,
            top1_p=lp.argmax(-1),
            top1_q=lq.argmax(-1),
            top1_probability_p=lp.amax(-1).exp(),
            top1_probability_q=lq.amax(-1).exp(),
            rank_q=(lq > lq.gather(-1, ids)).sum(-1),
        )
        if forbidden:  # p forbids a word that q allows, and both forbid one
            m = torch.log((lp.exp() + lq.exp()) / 2)
            terms = [torch.where(x.exp() > 0, x.exp() * (x - m), 0.0).nan_to_num().sum(-1) for x in (lp, lq)]
            expected = expected._replace(
                kl_qp=torch.full_like(kl_qp, torch.inf), jensen_shannon=sum(terms) / 2
            )
        assert 1 < (expected.top1_p == 5).sum() < TOKENS - 1
        (hp, p), (hq, q) = models(
            [x if n % 3 == 0 else x[split.rows] for n, x in enumerate(tensors)], split.group
        )
        actual = token_statistics(hp, p, hq, q, tokens, options=CHUNKS)
        for name, ours, other in zip(TokenStatistics._fields, actual, expected, strict=True):
            assert_close(ours, other, msg=lambda m, name=name: f"{name}: {m}")
            split.same(ours)


@check(2)
def an_objective_gets_the_terms_and_gives_the_gradients(split):
    tokens, weights = (
        torch.tensor([5, 30, 0, 8, 9, 10, 23, 24, 36, 12, 3]),
        torch.linspace(-1, 2, TOKENS).double(),
    )

    def loss_of(token_logp, token_logq, kl, entropy, rows=slice(None)):
        w = weights[rows]
        losses = w * torch.exp(token_logp - token_logq) + (w + 2) * kl - 0.3 * entropy * w
        return torch.where(torch.arange(TOKENS)[rows] == 6, 0.0, losses)

    for shared, forbidden in ((False, False), (True, False), (False, True)):
        tensors = made(0.7, shared=shared, forbidden=forbidden)
        tensors[2][12] = tensors[5][12]  # what p forbids, q does, too
        tokens[[9, 10]] = torch.tensor([12, 3] if not forbidden else [7, 8])
        right = local_rows(tensors, slice(None))
        p, q = models(right)
        lp, lq = (x[:, tensors[2] > -torch.inf] for x in (logp(p), logp(q)))
        picked = [logp(x).gather(-1, tokens[:, None])[:, 0] for x in (p, q)]
        terms = [*picked, TEXTBOOK["kl"](lp, lq), -(lp.exp() * lp).sum(-1)]
        loss_of(*terms).sum().backward()
        mine = local_rows(tensors, split.rows)
        (hp, head_p), (hq, head_q) = models(mine, split.group)
        loss, actual = linear_objective(
            hp, head_p, tokens, hq, head_q, lambda t, rows: loss_of(*t, rows), options=CHUNKS
        )
        for ours, other in zip(actual, terms, strict=True):
            assert_close(ours, other.detach())
        loss.backward()
        split.same(hp.grad)
        gradients_agree(mine, right, split.rows)


@check(2)
def a_row_that_overlaps_nowhere_is_infinite_and_harms_no_other(split):
    tensors = made(forbidden=True)
    p, q = models(tensors)
    p[1].bias[12] = (
        0.0  # q forbids word 3 with p; it will forbid word 12, which p allows, in no row but those below
    )
    lp, lq = logp(p), logp(q)
    lp[2], lq[2] = -torch.inf, -torch.inf
    lp[2, 8], lq[2, 30] = 0.0, 0.0  # no overlap, on different ranks
    lq[5, 12] = -torch.inf
    lp[7] = torch.nan
    lq[9], lp[9] = -60.0 * torch.arange(WORDS), -60.0 * torch.arange(WORDS).flip(0)  # far: inf nowhere
    lp, lq = (x.log_softmax(-1) for x in (lp, lq))
    value = torch.where(lp.exp() > 0, lp.exp() * (lp - lq).nan_to_num(nan=0.0, posinf=torch.inf), 0.0).sum(-1)
    value[7] = torch.nan
    assert value[2] == torch.inf and value[5] == torch.inf and value.isfinite().sum() == TOKENS - 3
    weights = torch.where(value.isfinite(), 1.0, 0.0).double()
    right = [x.clone().requires_grad_() for x in (lp[:, :], lq[:, :])]
    fine = value.isfinite()
    a, b = (x[fine].log_softmax(-1) for x in right)
    both = (a > -torch.inf) & (b > -torch.inf)
    a_, b_ = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
    torch.where(both, a_.exp() * (a_ - b_), 0.0).sum().backward()
    mine = [x[:, split.rows].clone().requires_grad_() for x in (lp, lq)]
    heads = [Head(None, vocabulary_group=split.group) for _ in "pq"]
    actual = linear_kl(mine[0].detach(), heads[0], mine[1].detach(), heads[1], options=CHUNKS)
    assert_close(actual, value, equal_nan=True)
    split.same(actual.nan_to_num())
    loss, per_token = linear_kl_loss(mine[0], heads[0], mine[1], heads[1], weights=weights, options=CHUNKS)
    assert_close(per_token, torch.where(fine, value, 0.0))
    loss.backward()
    for x, y in zip(mine, right, strict=True):
        assert_close(x.grad, y.grad[:, split.rows].nan_to_num())


@check(2)
def local_logits_get_their_own_gradient(split):
    tensors = made()
    right = [(tensors[0] @ tensors[1].T).requires_grad_(), *local_rows(tensors, slice(None))[3:]]
    TEXTBOOK["kl"](right[0].log_softmax(-1), logp((right[1], Head(right[2], right[3])))).sum().backward()
    hidden = right[0].detach()[:, split.rows].clone().requires_grad_()
    mine = local_rows(tensors, split.rows)[3:]
    head = Head(mine[1], mine[2], vocabulary_group=split.group)
    linear_kl(hidden, Head(None, vocabulary_group=split.group), mine[0], head).sum().backward()
    assert_close(hidden.grad, right[0].grad[:, split.rows])
    assert_close(mine[0].grad, right[1].grad)
    assert_close(mine[1].grad, right[2].grad[split.rows])


@check(2)
def one_side_may_be_whole_if_its_head_is_frozen(split):
    tensors = made()
    right = local_rows(tensors, slice(None))
    p, q = models(right)
    TEXTBOOK["kl"](logp(p), logp(q)).sum().backward()
    mine = local_rows(tensors, split.rows)
    teacher = Head(tensors[4], tensors[5])
    arguments = mine[0], Head(mine[1], mine[2], vocabulary_group=split.group), mine[3], teacher
    linear_kl_loss(*arguments, weights=torch.ones(TOKENS).double()).loss.backward()
    for n in (0, 1, 2, 3):
        assert_close(mine[n].grad, right[n].grad if n % 3 == 0 else right[n].grad[split.rows])
    logits = (tensors[3] @ tensors[4].T + tensors[5]).detach()
    actual = linear_kl(*arguments[:2], logits, Head(None))
    assert_close(actual, linear_kl(*arguments))


@check(2)
def one_weight_trained_on_both_sides(split):
    tensors = made(shared=True)
    right = local_rows(tensors, slice(None))
    TEXTBOOK["kl"](*(logp((right[n], Head(right[1], right[2]))) for n in (0, 3))).sum().backward()
    mine = local_rows(tensors, split.rows)
    head = Head(mine[1], mine[2], vocabulary_group=split.group)
    weights = torch.ones(TOKENS).double()
    linear_kl_loss(mine[0], head, mine[3], head, weights=weights, options=CHUNKS).loss.backward()
    for n in (0, 1, 2, 3):
        assert_close(mine[n].grad, right[n].grad if n % 3 == 0 else right[n].grad[split.rows])
    assert (linear_kl(mine[0], head, mine[0], head) == 0).all()


@check(2)
def rows_that_are_not_read_and_tokens_that_are_not_there(split):
    tensors = made()
    exact = TEXTBOOK["kl"](*(logp(side) for side in models(tensors)))
    tensors[0][3] = torch.nan
    mine = local_rows(tensors, split.rows)
    (hp, p), (hq, q) = models(mine, split.group)
    weights = torch.ones(TOKENS).double()
    weights[3] = 0
    loss, per_token = linear_kl_loss(hp, p, hq, q, weights=weights)
    loss.backward()
    assert per_token[3] == 0 and all(x.grad.isfinite().all() for x in mine)
    actual = linear_kl(hp, p, hq, q)
    assert actual[3].isnan() and actual.isfinite().sum() == TOKENS - 1
    weights.requires_grad_(False)
    torch.where(weights != 0, actual, 0.0).sum().backward()
    assert all(x.grad.isfinite().all() for x in mine)
    for tokens in (0, 1):
        few = linear_kl(hp[:tokens], p, hq[:tokens], q)
        assert_close(few.detach(), exact[:tokens])
        actual = token_statistics(hp[:tokens], p, hq[:tokens], q, torch.arange(36, 36 + tokens))
        assert actual.rank_q.shape == (tokens,)


@check(2)
def ranks_with_unequal_memory_agree(split):
    exact = TEXTBOOK["kl"](*(logp(side) for side in models(made())))
    p, q = models(local_rows(made(), split.rows), split.group)
    options = LinearOptions(buffer_bytes=(10**9, 9_000, 10**6, 20_000)[split.rank])
    assert_close(linear_kl(*p, *q, options=options).detach(), exact)


@check(2)
def a_compiled_caller_gets_the_same(split):
    if dist.get_rank() > 1:  # one group is enough of what takes seconds
        return
    weights = torch.linspace(-1, 2, TOKENS).double()
    group = split.group

    def loss(hp, wp, bp, hq, wq, bq):
        p, q = Head(wp, bp, vocabulary_group=group), Head(wq, bq, vocabulary_group=group)
        both = linear_kl(hp * 2, p, hq, q).sum()
        return both + linear_kl_loss(hp, p, hq, q, weights=weights).loss

    right = local_rows(made(), slice(None))
    p, q = models(right)
    doubled = logp((2 * p[0], p[1]))
    truth = TEXTBOOK["kl"](doubled, logp(q)).sum() + (weights * TEXTBOOK["kl"](logp(p), logp(q))).sum()
    truth.backward()
    mine = local_rows(made(), split.rows)
    actual = torch.compile(loss, backend="aot_eager")(*mine)
    actual.backward()
    assert_close(actual.detach(), truth.detach())
    gradients_agree(mine, right, split.rows)


@contextmanager
def counted():
    """The messages that are sent: their elements for each rank, and bytes."""
    sent = []

    def counts(function, place):
        def call(*args, **kwargs):
            sent.append((args[place].numel(), args[place].nbytes))
            return function(*args, **kwargs)

        return call

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with pytest.MonkeyPatch.context() as patch:
        for name, place in (("all_reduce", 0), ("all_gather", 1), (gather, 1)):
            patch.setattr(dist, name, counts(getattr(dist, name), place))
        yield sent


def calls(mine, group, tokens):
    """The functions whose messages are counted."""
    frozen = [x.detach() for x in mine]
    (fp, p), (fq, q) = models(frozen, group)
    hp, head_p = models(mine, group)[0]
    weights = torch.ones(len(hp))

    def each(terms, rows):
        return terms.kl + terms.token_logp - terms.entropy

    def of_values():
        linear_kl(hp, head_p, fq, q).sum().backward()

    return {
        "`linear_kl`": lambda: linear_kl(fp, p, fq, q),
        "`linear_kl` and its gradient": of_values,
        "`linear_divergence`, other than KL": lambda: linear_divergence(fp, p, fq, q, divergence="hellinger"),
        "`linear_kl_loss`": lambda: linear_kl_loss(hp, head_p, fq, q, weights=weights),
        "`linear_divergence_loss`, other than KL": lambda: linear_divergence_loss(
            hp, head_p, fq, q, weights=weights, divergence="hellinger"
        ),
        "`linear_objective`": lambda: linear_objective(hp, head_p, tokens, fq, q, each),
        "`token_statistics`": lambda: token_statistics(fp, p, fq, q, tokens),
    }


@check(2, 4)
def messages(split):
    """Numbers for each token and messages for each chunk: what is left when constants are taken away."""
    actual = {}
    for words in (37, 74):
        cuts = [c * words // 37 for c in CUTS[split.size]]
        rows = slice(cuts[split.rank], cuts[split.rank + 1])
        for size in (16, 32):
            mine = local_rows(made(dtype=torch.float32, tokens=size, words=words), rows)
            for name, call in calls(mine, split.group, torch.arange(size)).items():
                with counted() as sent:
                    call()
                large = [numbers for numbers, _ in sent if numbers >= size]
                small = [numbers for numbers, _ in sent if numbers < size]
                assert max(small) <= 6 and all(numbers % size == 0 for numbers in large), (name, sent)
                table = {
                    "numbers a token": sum(large) // size,
                    "bytes a token": sum(b for n, b in sent if n >= size) // size,
                    "messages a chunk": len(large),
                    "messages a call": len(small),
                }
                assert actual.setdefault(name, table) == table, (name, words, size, actual[name], table)
    return actual


@check(2)
def arguments_that_differ_between_ranks_are_refused(split):
    """What would be wrong in silence, or end in a wait for a message that is never sent."""
    tensors = made(dtype=torch.float32)
    hp, wp, bp, hq, wq, bq = [x if n % 3 == 0 else x[split.rows] for n, x in enumerate(tensors)]
    group, first = split.group, split.rank == 0
    p, q = Head(wp, bp, vocabulary_group=group), Head(wq, bq, vocabulary_group=group)
    stored_p, stored_q = (Head(stored(tensors[n], split).detach()) for n in (1, 4))
    moved = tensors[4][max(0, split.rows.start - 1) : split.rows.stop - (split.rank < split.size - 1)]
    ids = torch.full((TOKENS,), 37)

    def trained(x):
        return x.clone().requires_grad_(first)

    for says, call in (
        ("rows of p's head and ", lambda: linear_kl(hp, p, hq, Head(moved, vocabulary_group=group))),
        ("[10, 11] tokens to do", lambda: linear_kl(hp[first:], p, hq[first:], q)),
        ("disagree on the tensors that", lambda: linear_kl(trained(hp), p, hq, q)),
        ("disagree on the tensors that", lambda: linear_kl(trained(hp), stored_p, hq, stored_q)),
        ("disagree on the bytes a", lambda: linear_kl(hp.double() if first else hp, p, hq, q)),
        ("on the temperature", lambda: linear_kl(hp, stored_p, hq, stored_q, temperature=1.0 + first)),
        ("covers 36 tokens", lambda: linear_kl(hp, p, hq, Head(tensors[4][:36]))),
        ("covers 36 tokens", lambda: linear_kl(hp, Head(tensors[1][:36]), hq, stored_q)),
        ("do not fit together", lambda: linear_kl(hp, Head(stored_p.weight, tensors[2]), hq, stored_q)),
        ("of 37 rows; split it", lambda: linear_kl(hp, p, hq, Head(tensors[4].clone().requires_grad_()))),
        ("ids run from 37 to 37", lambda: token_statistics(hp, p, hq, q, ids)),
        ("has no gradient", lambda: log_probabilities(hp.clone().requires_grad_(), p)),
        ("and q's over [", lambda: linear_kl(hp, p, hq, Head(wq, vocabulary_group=GROUPS[4]))),
        ("this process is not in", lambda: Head(wp, vocabulary_group=dist.GroupMember.NON_GROUP_MEMBER)),
    ):
        with refused(says):
            call()


if __name__ == "__main__":
    store, folder, *only = sys.argv[1:]
    own_rank = fork_ranks(4, [store])
    main(own_rank, store, f"{folder}/rank{own_rank}.json", only)
