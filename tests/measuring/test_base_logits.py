"""llama.cpp's files of base logits: the codes, the bounds that they allow, and the statistics."""

import math
import re
import struct
from functools import partial

import numpy as np
import pytest
import torch
from damaged_files import outcomes_of_damage
from gguf_file import write_gguf
from tiny_models import double_logits, tiny_pair

from kleash.cli import main
from kleash.engines.base_logits import columns_of_rows
from kleash.errors import KleashError, ModelError, NonFiniteError, OptionError, RunFolderError, SourceError
from kleash.measuring import cache_reference, measure
from kleash.measuring.estimates import with_reasons
from kleash.measuring.llama_cpp_summary import format_llama_cpp
from kleash.models.base_logit_bounds import impossible_row, kl_bounds, logp_intervals, reverse_kl_bounds
from kleash.models.base_logits import BaseLogitsRows, encode_rows, open_base_logits, row_values
from kleash.models.heads import head_logits
from kleash.records import CacheJob, MeasureJob, RunFolder, WrittenLogits
from kleash.uncertainty import ratio_of_sums

CONTEXT = 32


def write_base_logits(**options):
    """What ``kleash cache --format llama.cpp`` writes."""
    written = cache_reference(CacheJob(format="llama.cpp", **options))
    assert isinstance(written, WrittenLogits)
    return written


def measure_against(path, policy, out, **options):
    """The measurement of a policy against a file of base logits."""
    return measure(reference_cache=path, policy=policy, out=out, **options)


def decode(rows, vocab):
    """One row by struct, without numpy's views: scale, minimum, codes."""
    data = rows.tobytes()
    scale, minimum = struct.unpack_from("<ff", data)
    return scale, minimum, list(struct.unpack_from(f"<{vocab}H", data, 8))


def rows_of(logits):
    """The rows that a file would hold."""
    stored = encode_rows(logits)
    numbers = np.ascontiguousarray(stored[:, :4]).view("<f4")
    return BaseLogitsRows(
        scale=numbers[:, 0], minimum=numbers[:, 1], codes=stored[:, 4 : 4 + logits.shape[-1]]
    )


@pytest.mark.parametrize(("spread", "vocab"), [(0.5, 50), (12.0, 51)])
def test_codes_are_those_of_llama_cpp(spread, vocab):
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0)) * spread
    stored = encode_rows(logits)
    assert stored.shape == (4, 2 * ((vocab + 1) // 2) + 4)
    for row, values in zip(stored, logits.tolist(), strict=True):
        # perplexity.cpp, log_softmax, in Python's floats
        most = max(values)
        least = max(min(values), most - 16)
        log_sum = math.log(sum(math.exp(value - most) for value in values))
        scale, minimum, codes = decode(row, vocab)
        assert scale == pytest.approx((most - least) / 65535, rel=1e-6)
        assert minimum == pytest.approx(least - most - log_sum, abs=1e-5)
        for value, code in zip(values, codes, strict=True):
            expected = (value - least) / (most - least) * 65535 if value > least else 0
            assert abs(code - expected) <= 0.53
            assert code == 0 or value > least


def test_equal_logits_have_code_0_and_exact_bounds():
    rows = rows_of(torch.zeros(2, 8))
    assert not rows.codes.any() and not rows.scale.any()
    lowest, highest, *_ = logp_intervals(rows)
    assert (highest - lowest).max() < 1e-5
    assert (lowest < -math.log(8)).all() and (highest > -math.log(8)).all()
    with pytest.raises(ModelError, match="not all finite"):
        encode_rows(torch.tensor([[0.0, torch.inf]]))


@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_the_exact_kl_lies_between_its_bounds_at_every_token(spread):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(200, 300, generator=generator) * spread
    moved = logits + torch.randn(200, 300, generator=generator) * torch.logspace(-4, 1, 200)[:, None]
    logp, logq = logits.double().log_softmax(-1), moved.double().log_softmax(-1)
    base = logp_intervals(rows := rows_of(logits))
    lowest, highest = base.lowest, base.highest
    assert ((lowest <= logp) & (logp <= highest)).all()
    is_token = torch.arange(300) % 3 > 0
    columns = columns_of_rows(moved, rows, base, np.zeros(200, dtype=int), ~is_token)
    reverse, forward = (
        [torch.from_numpy(columns[f"kl_{of}_over_tokens_{end}"]) for end in ("lower", "upper")]
        for of in ("policy_reference", "reference_policy")
    )
    p, q = (x[:, is_token].log_softmax(-1) for x in (logp, logq))
    for (lower, upper), exact in (
        (kl_bounds(base, logq), (logp.exp() * (logp - logq)).sum(-1)),
        (reverse_kl_bounds(base, logq), (logq.exp() * (logq - logp)).sum(-1)),
        (forward, (p.exp() * (p - q)).sum(-1)),
        (reverse, (q.exp() * (q - p)).sum(-1)),
    ):
        assert ((lower >= 0) & (lower <= exact + 1e-12) & (exact <= upper + 1e-12)).all()
        if spread < 2:  # nothing is clipped
            assert (upper - lower).max() < 3e-3
            assert ((upper - lower) / exact)[-50:].max() < 1e-3
    # Every other distribution that the codes allow, too.
    widths = torch.where(lowest.isfinite(), highest - lowest, 0)
    drawn = (highest - widths * (0.3 + 0.4 * torch.rand(widths.shape, generator=generator))).exp()
    other = drawn / drawn.sum(-1, keepdim=True)
    allowed = ((other.log() >= lowest) & (other.log() <= highest)).all(-1)
    lower, upper = kl_bounds(base, logq)
    value = (other * (other.log() - logq)).sum(-1)
    assert allowed.sum() > 20
    assert ((lower <= value + 1e-12) & (value <= upper + 1e-12))[allowed].all()


def stored_by(logits, span):
    """The rows that llama.cpp (span 16) or ik_llama.cpp (24) writes, by their formulas in float32."""
    values = logits.numpy()
    most = values.max(-1, keepdims=True)
    least = np.maximum(values.min(-1, keepdims=True), most - np.float32(span))
    log_sum = np.log(np.exp(values - most).astype(np.float64).sum(-1, keepdims=True)).astype(np.float32)
    scale = (most - least) / np.float32(65535)
    codes = np.where(values > least, np.rint((1 / scale) * (values - least)), 0).astype(np.uint16)
    return BaseLogitsRows(scale=scale[:, 0], minimum=(least - most - log_sum)[:, 0], codes=codes)


@pytest.mark.parametrize("span", [16.0, 24.0])
@pytest.mark.parametrize("center", [0.0, -125.0, 1e4])
def test_bounds_hold_where_the_range_of_codes_is_rounded_and_where_q_is_0(span, center):
    """16 below a logit of -120 is a number whose last digit float32 rounds."""
    generator = torch.Generator().manual_seed(2)
    logits = center + 6 * torch.randn(100, 400, generator=generator)
    logits[50:] = center - 30 * torch.rand(50, 400, generator=generator)
    stored = stored_by(logits, span)
    base = logp_intervals(stored)
    logp = logits.double().log_softmax(-1)
    assert ((base.lowest <= logp) & (logp <= base.highest)).all() and impossible_row(base) is None
    moved = logits + 0.1 * torch.randn(100, 400, generator=generator)
    forbidden = moved.masked_fill(torch.rand(100, 400, generator=generator) < 0.01, -torch.inf)
    unlikely = moved.masked_fill(
        (stored_codes := torch.from_numpy(stored.codes.astype(int))) == 0, -torch.inf
    )
    assert (stored_codes == 0).sum() > 100
    for values in (moved, forbidden, unlikely):
        logq = values.double().log_softmax(-1)
        exact = (logp.exp() * (logp - logq)).sum(-1)
        reverse = (logq.exp() * (logq - logp)).nan_to_num(nan=0).sum(-1)
        for (lower, upper), kl in ((kl_bounds(base, logq), exact), (reverse_kl_bounds(base, logq), reverse)):
            assert ((lower <= kl + 1e-12) & (kl <= upper + 1e-12)).all()
    # what only tokens of code 0 lack is 0 in another base of the same codes
    lower, upper = kl_bounds(base, unlikely.double().log_softmax(-1))
    is_open = base.lowest.isneginf().any(-1)
    assert lower[is_open].isfinite().all() and is_open.sum() > 20
    assert reverse_kl_bounds(base, unlikely.double().log_softmax(-1))[1].isfinite().all()
    lower = kl_bounds(base, forbidden.double().log_softmax(-1))[0]
    assert lower.isinf().sum() > 50


def test_a_code_that_changes_what_probabilities_sum_to_is_named(written, tmp_path):
    policy, _, path = written
    file = open_base_logits(path)
    row_bytes = 2 * row_values(file.vocab_size)
    place = 20 + 4 * file.chunks * CONTEXT + row_bytes * (2 * file.scored + 5)
    token = int(np.argmin(np.abs(file.read(2, 5, 6).codes[0].astype(int) - 50_000)))
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, place + 8 + 2 * token, 65_535)
    (tmp_path / "changed.kld").write_bytes(data)
    with pytest.raises(SourceError, match=r"sum to between .* not to 1, at scored position 5 of chunk 2"):
        measure_against(tmp_path / "changed.kld", policy, tmp_path / "run")


@pytest.mark.parametrize(("value", "is_refused"), [(math.nan, True), (math.inf, True), (-math.inf, False)])
def test_logits_that_are_no_numbers_are_refused(written, monkeypatch, value, is_refused, tmp_path):
    def changed_logits(*arguments):
        logits = head_logits(*arguments)
        logits[3, 7] = value
        return logits

    monkeypatch.setattr("kleash.engines.base_logits.head_logits", changed_logits)
    if is_refused:
        with pytest.raises(NonFiniteError, match="the policy gives NaN or infinite logits"):
            measure_against(written[2], written[0], tmp_path / "run", limit=1)
    else:
        numbers = measure_against(written[2], written[0], tmp_path / "run", limit=1).per_token
        assert numbers["kl_reference_policy_upper"].value == math.inf
        assert math.isfinite(numbers["kl_policy_reference_lower"].value)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A policy, a reference, and the reference's base logits of a text."""
    folder = tmp_path_factory.mktemp("logits")
    policy, reference = tiny_pair(folder, max_position_embeddings=CONTEXT)
    text = folder / "text.txt"
    text.write_text("A long road leads out of the town; nobody remembers where. " * 12)
    result = write_base_logits(
        out=str(folder / "base.kld"), reference=str(reference), text=str(text), window=CONTEXT, limit=8
    )
    assert (result.chunks, result.context, result.vocabulary) == (8, CONTEXT, 320)
    assert result.bytes == (folder / "base.kld").stat().st_size
    return policy, reference, folder / "base.kld"


def test_a_file_has_the_second_half_of_each_chunk_after_the_begin_token(written):
    _, reference, path = written
    file = open_base_logits(path)
    assert (file.context, file.scored, file.vocab_size) == (CONTEXT, 15, 320)
    assert file.tokens(0)[0] == 0 and file.tokens(1)[0] != 0
    ids = [0, *file.tokens(1)[1:].tolist()]
    expected = double_logits(reference, ids)[16:31].log_softmax(-1)
    lowest, highest, *_ = logp_intervals(file.read(1, 0, 15))
    assert ((lowest - 1e-5 <= expected) & (expected <= highest + 1e-5)).all()
    assert (highest - lowest)[lowest.isfinite()].max() < 3e-4


@pytest.fixture(scope="module")
def run(written, tmp_path_factory):
    """The folder and the measurement of the policy against the file."""
    out = tmp_path_factory.mktemp("base") / "run"
    return out, measure_against(written[2], written[0], out)


def test_a_policy_is_measured_against_the_file(written, run, capsys):
    policy, reference, path = written
    folder, result = run
    file = open_base_logits(path)
    forward, reverse, ratio, entropy = [], [], [], []
    for chunk in (file.tokens(number).tolist() for number in range(file.chunks)):
        ids = [0, *chunk[1:]]
        logp, logq = (double_logits(model, ids)[16:31].log_softmax(-1) for model in (reference, policy))
        forward += (logp.exp() * (logp - logq)).sum(-1).tolist()
        reverse += (logq.exp() * (logq - logp)).sum(-1).tolist()
        entropy += (-logq.exp() * logq).sum(-1).tolist()
        ratio += [(logp - logq)[n, token].item() for n, token in enumerate(chunk[17:])]
    numbers = result.per_token
    assert (result.counts.tokens, result.counts.clusters) == (120, 8)
    kl = float(np.mean(forward))
    assert numbers["kl_reference_policy_lower"].value <= kl <= numbers["kl_reference_policy_upper"].value
    assert numbers["kl_reference_policy_upper"].value - numbers["kl_reference_policy_lower"].value < 1e-3 * kl
    assert numbers["kl_policy_reference_lower"].value <= float(np.mean(reverse))
    assert numbers["llama_cpp_kld"].value == pytest.approx(kl, rel=1e-3)
    assert numbers["entropy_policy"].value == pytest.approx(float(np.mean(entropy)), rel=1e-5)
    assert math.log(result.perplexity["ratio"].value) == pytest.approx(float(np.mean(ratio)), abs=1e-3)
    means = np.array(forward).reshape(8, -1).mean(-1)
    assert numbers["llama_cpp_kld"].standard_error == pytest.approx(means.std(ddof=1) / 8**0.5, rel=1e-2)
    assert "kl_reference_policy" not in numbers and "16 bits" in result.left_out["kl_reference_policy"]
    assert result.notes[0] == "the policy's head has 320 rows for 300 tokens"
    assert main(["report", str(folder), "--format", "llama.cpp"]) == 0
    text = capsys.readouterr().out
    assert f"Mean    KLD: {numbers['llama_cpp_kld'].value:10.6f} ± " in text and len(text.splitlines()) == 39
    columns = ["kl_reference_policy_lower", "kl_reference_policy_upper", "llama_cpp_kld"]
    tables = list(RunFolder(folder).parts("tokens", columns))
    low, high, kld = (np.concatenate([table[name] for table in tables]) for name in columns)
    assert ((low <= np.array(forward) + 1e-6) & (np.array(forward) <= high + 1e-6)).all()
    assert kld == pytest.approx(forward, abs=1e-3)


def test_a_run_is_gated_compared_and_resumed_as_any_other(written, run, tmp_path, capsys):
    """Of base logits of another chunk it is not resumed."""
    policy, reference, path = written
    out = tmp_path / "own"
    own = measure_against(path, reference, out, at_most=1.0)
    assert own.per_token["kl_reference_policy_lower"].value < 1e-12
    assert own.per_token["kl_reference_policy_upper"].value < 3e-4
    assert own.top1_agreement.value == 1
    assert own.gate is not None and own.gate.ci95[1] < 1
    assert main(["compare", str(run[0]), str(out), "--out", str(tmp_path / "c.html")]) == 0
    printed, kld = " ".join(capsys.readouterr().out.split()), run[1].per_token["llama_cpp_kld"]
    assert re.search(r"own \S+ to \S+ nats", printed)
    assert f" -{kld.rounded} ± {kld.format(kld.standard_error)} nats" in printed  # the other run's KLD is 0
    next((out / "sequences").iterdir()).unlink()
    again = measure_against(path, reference, out, at_most=1.0, resume=True)
    assert again.statistics() == own.statistics()
    data = bytearray(path.read_bytes())
    data[20 + 4 * CONTEXT * 8 + 8] ^= 1
    path.with_name("other.kld").write_bytes(data)
    with pytest.raises(RunFolderError, match="another run"):
        measure_against(path.with_name("other.kld"), reference, out, at_most=1.0, resume=True)
    few = measure_against(path, policy, tmp_path / "few", limit=1)
    assert (few.counts.tokens, few.counts.clusters) == (15, 1)
    assert math.isnan(few.per_token["llama_cpp_kld"].standard_error)
    assert main(["report", str(tmp_path / "few"), "--format", "llama.cpp"]) == 2
    assert "takes 100 tokens or more" in capsys.readouterr().err


def test_a_gguf_says_whether_a_begin_token_is_put_and_a_file_whether_it_was(written, tmp_path):
    """Files of Llama 3 say nothing, and llama.cpp puts one before their texts, as the reference's tokenizer does."""
    _, reference, path = written

    def set_begin(writer, adds, pre):
        for key in ("add_bos_token", "pre"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}", None)
        writer.add_tokenizer_pre(pre)
        if adds is not None:
            writer.add_add_bos_token(adds)

    cases = ((True, "gpt-2"), (None, "llama-bpe"), (False, "llama-bpe"), (None, "gpt-2"))
    for (adds, pre), expected in zip(cases, (True, True, False, False), strict=True):
        model = write_gguf(
            reference, reference / f"{adds}-{pre}.gguf", edit=partial(set_begin, adds=adds, pre=pre)
        )
        base = tmp_path / f"{adds}-{pre}.kld"
        write_base_logits(out=base, reference=model, text=path.with_name("text.txt"), window=CONTEXT)
        assert (open_base_logits(base).tokens(0)[0] == 0) == expected, base
        for file, policy in ((path, model), (base, reference)):
            out = tmp_path / f"{file.stem}-{policy.name}"
            result = measure_against(file, policy, out, tokenizer=reference, limit=2)
            assert abs(result.per_token["llama_cpp_kld"].value) < 3e-4, out


def test_quantiles_of_many_tokens_are_rounded_as_those_of_llama_cpp():
    """p = 0.999f * (n - 1) is a float there, and 0.999 of 15 359 gaps is not the same number in float64."""
    count = 15_360
    kld = np.cumsum(np.arange(count)) / 1e5
    flags = np.zeros(count, dtype=np.float32)
    text = format_llama_cpp(nll=flags, nll_base=flags, kld=kld, dp=flags, same_top=flags == 0)
    place = np.multiply(np.float32(0.999), np.float32(count - 1), dtype=np.float32)
    low, high = np.float32(kld[int(place)]), np.float32(kld[int(place) + 1])
    rest = np.subtract(place, np.float32(int(place)), dtype=np.float32)
    expected = np.add((np.float32(1) - rest) * low, rest * high, dtype=np.float32)
    assert f"99.9%   KLD: {expected:10.6f}" in text
    middle = kld.astype(np.float32)[count // 2 - 1 : count // 2 + 1]
    assert f"Median  KLD: {middle.mean():10.6f}" in text
    in_float64 = np.interp(0.999 * (count - 1), np.arange(count), kld)
    assert f"{in_float64:10.6f}" != f"{expected:10.6f}"


def test_columns_leave_out_what_the_base_gives_less_than_e_to_the_minus_16():
    logits = torch.tensor([[0.0, -15.9, -17.0, -40.0], [1.0, 0.0, -1.0, -30.0]])
    moved = logits + torch.tensor([0.0, 1.0, 9.0, 20.0])
    rows = rows_of(logits)
    columns = columns_of_rows(moved, rows, logp_intervals(rows), np.array([2, 0]))
    logp, logq = logits.double().log_softmax(-1), moved.double().log_softmax(-1)
    terms = torch.where(logits > -16, logp.exp() * (logp - logq), 0)
    assert columns["llama_cpp_kld"] == pytest.approx(terms.sum(-1).numpy(), abs=1e-4)
    assert columns["logp_policy"][0] == pytest.approx(logq[0, 2].item(), rel=1e-6)
    assert columns["logp_reference"] == pytest.approx([logp[0, 0].item() - 16, logp[1, 0].item()], abs=1e-4)
    assert columns["is_clipped"].tolist() == [True, False]
    share = ratio_of_sums(columns["is_clipped"].astype(float), np.ones(2), unit="probability")
    names = ("is_clipped", "logp_reference", "perplexity_ratio", "perplexity_reference")
    told = with_reasons(dict.fromkeys(names, share))
    assert told["logp_reference"].warnings == told["perplexity_ratio"].warnings
    assert told["perplexity_ratio"].warnings[-1].startswith("at most this: of 50 % of the tokens")
    assert told["perplexity_reference"].warnings[:-1] == share.warnings
    assert (columns["top1_policy"] == columns["top1_reference"]).tolist() == [True, False]


@pytest.mark.parametrize(
    ("layout", "offset", "value", "reason"),
    [
        ("<8s", 0, b"_logits-", "does not begin with _logits_"),
        ("<i", 8, 1, "of 8 chunks of 1 tokens .* by its header"),
        ("<i", 8, 33, "chunks of 33 tokens .* by its header, and has"),
        ("<i", 12, 2**30, "a vocabulary of 1073741824"),
        ("<i", 16, 2**31 - 1, "of 2147483647 chunks of 32 tokens"),
        ("<i", 20, 320, "a token beyond its vocabulary of 320"),
        ("<f", 20 + 4 * 256, math.nan, "has the scale nan and the smallest"),
        ("<f", 24 + 4 * 256, -30.0, "the smallest log-probability -30 at scored position 0 of chunk 0"),
    ],
)
def test_hostile_files_are_refused(written, tmp_path, layout, offset, value, reason):
    data = bytearray(written[2].read_bytes())
    struct.pack_into(layout, data, offset, value)
    path = tmp_path / "base.kld"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=reason):
        open_base_logits(path).read(0, 0, 15)


def test_a_file_of_holes_takes_no_memory(tmp_path):
    """31 GB of zeros that no disk holds: tokens are read a chunk at a time."""
    context, vocab, chunks = 4, 1, 1_100_000_000
    path = tmp_path / "sparse.kld"
    with path.open("wb") as file:
        file.write(b"_logits_" + struct.pack("<3i", context, vocab, chunks) + struct.pack("<i", 9))
        file.truncate(20 + chunks * (4 * context + 2 * 6))
    with pytest.raises(SourceError, match="a token beyond its vocabulary of 1"):
        open_base_logits(path)


def test_damaged_files_are_refused_in_a_sentence(written, tmp_path):
    def read(path):
        file = open_base_logits(path)
        rows = [file.read(chunk, 0, file.scored) for chunk in range(file.chunks)]
        arrays = [array for part in rows for array in (part.scale, part.minimum, part.codes)]
        tokens = [file.tokens(chunk) for chunk in range(file.chunks)]
        return file.context, [array.tobytes() for array in (*tokens, *arrays)]

    path = tmp_path / "base.kld"
    path.write_bytes(written[2].read_bytes())
    outcomes, failures = outcomes_of_damage(path, 20 + 4 * 256, read, 200)
    assert failures == [] and outcomes["refused"] > 100


def test_models_and_options_that_do_not_fit_are_refused(written, tmp_path):
    policy, reference, path = written
    other = tmp_path / "other.kld"
    data = bytearray(path.read_bytes())
    struct.pack_into("<i", data, 12, 330)
    row, scored = 334, 15
    other.write_bytes(data[: 20 + 4 * 256] + bytes(2 * row * scored * 8))
    with pytest.raises(ModelError, match=r"has 320 logits for 300 tokens and .*other.kld has 330 logits"):
        measure_against(other, policy, tmp_path / "run")
    struct.pack_into("<i", data, 12, 299)
    other.write_bytes(data[:20] + bytes(4 * 256 + 2 * 304 * scored * 8))
    with pytest.raises(ModelError, match=r"has 320 logits for 300 tokens and .*other.kld has 299 logits"):
        measure_against(other, policy, tmp_path / "run")
    text = tmp_path / "short.txt"
    text.write_text("Short.")
    short = {"out": str(other), "reference": str(reference), "text": str(text)}
    with pytest.raises(SourceError, match=r"the text has 7 tokens, and llama\.cpp needs two chunks of 32"):
        write_base_logits(**short, window=32)
    text.write_text("Long. " * 100)
    with pytest.raises(ModelError, match="reads 32 tokens and a chunk has 64"):
        write_base_logits(**short, window=64)
    text.write_text("logits_" * 10)
    with pytest.raises(SourceError, match="does not begin with _logits_"):
        measure_against(text, policy, tmp_path / "run")


def test_options_that_do_not_suit_base_logits_are_refused(written):
    for wrong, reason in (
        ({"responses": "a", "text": None}, "--responses is not for"),
        ({"window": 3}, "--window must be at least 4"),
        ({"out": None}, "give its name as --out"),
        ({"stride": 16, "window": 32}, "--stride is not for"),
    ):
        with pytest.raises(OptionError, match=reason):
            CacheJob(**{"format": "llama.cpp", "text": "a", "out": "b", **wrong})
    for against, reason in (
        ({"prompts": "a"}, "leave --prompts out"),
        ({"text": "a"}, "leave --text out"),
        ({"temperature": 0.5}, "base logits are of 1"),
        ({"engine": "ray"}, "has workers"),
        ({"device_map": "fsdp"}, "divides the policy's head"),
        ({"until_relative_error": 0.1}, "needs the exact KL"),
        ({"policy": "http://a"}, "holds a loaded reference's hidden states"),
    ):
        with pytest.raises(OptionError, match=reason):
            MeasureJob(**{"reference_cache": str(written[2]), "policy": "a", **against})
    job = MeasureJob(reference_cache=str(written[2]), policy="a", window=8, reference="b")
    assert [words.split()[0] for words in job.without_effect()] == ["--window", "--reference"]


def test_the_command_writes_and_measures(written, tmp_path, capsys):
    policy, reference, path = written
    words = ["--policy", str(policy), "--reference-cache", str(path), "--out"]
    assert main(["measure", *words, str(tmp_path / "a"), "--quiet", "--format", "llama.cpp"]) == 0
    assert "Same top p:" in capsys.readouterr().out
    assert main(["measure", *words, str(tmp_path / "b"), "--limit", "2"]) == 0
    assert "KL(reference ‖ policy), upper bound" in capsys.readouterr().out
    text = tmp_path / "text.txt"
    text.write_text("A long road leads out of the town; nobody remembers where. " * 12)
    options = ["--reference", str(reference), "--text", str(text), "--window", "32", "--limit", "8", "--out"]
    again = tmp_path / "again.kld"
    assert main(["cache", "--format", "llama.cpp", *options, str(again)]) == 0
    assert f"use it with: kleash measure --policy MODEL --reference-cache {again}" in capsys.readouterr().out
    assert again.read_bytes() == path.read_bytes()
    assert main(["logits", str(path), "--policy", str(policy)]) == 2
    assert "is now kleash measure --policy MODEL --reference-cache FILE" in capsys.readouterr().err
    with pytest.raises(KleashError):
        open_base_logits(path.with_name("missing"))
