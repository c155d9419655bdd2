"""Kinds of source files (CSV, Parquet, JSON arrays, standard input) and TRL's data set formats: read or refused."""

import copy
import gzip
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_files import jsonl, parquet
from tiny_models import tiny_tokenizer

from kleash.errors import SourceError
from kleash.models import find_source, read_prompts, read_responses, read_text
from kleash.sources import files
from kleash.sources.dataset_formats import text_or_messages
from kleash.sources.documents import count_documents
from kleash.sources.files import detect_format, read_records, read_whole_text, source_path
from kleash.training.with_trl.preferences import read_pairs

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "The sea was calm."}
OTHER = {"role": "assistant", "content": "A grey boat."}
PROMPTS = ["The sea", 'was "calm", and', "two\nlines"]


def test_every_file_format_gives_the_same_prompts(pair, write):
    rows = [[text, str(place)] for place, text in enumerate(PROMPTS)]
    records = [{"prompt": text, "answer": str(place)} for place, text in enumerate(PROMPTS)]
    names = [
        write("a.jsonl", jsonl(*records)),
        write("a.json", json.dumps(records, indent=2)),
        write("strings.json", PROMPTS),
        write("pretty", json.dumps(records, indent=1)),
        write("a.csv", [["prompt", "answer"], *rows]),
        write("a.tsv", [["prompt", "answer"], *rows]),
        write("a", "prompt,answer\n" + 'The sea,0\n"was ""calm"", and",1\n"two\nlines",2\n'),
        write("excel.csv", '\ufeffprompt;answer\r\nThe sea;0\r\n"was ""calm"", and";1\r\n"two\nlines";2\r\n'),
        write("pandas.csv", ',prompt\n0,The sea\n1,"was ""calm"", and"\n2,"two\nlines"\n'),
        write("a.parquet", records),
        write("parquet_by_content", parquet(records)),
    ]
    expected = [one.token_ids for one in read_prompts(names[0], pair)]
    for name in names:
        assert [one.token_ids for one in read_prompts(name, pair)] == expected, name
        assert [one.text for one in read_prompts(name, pair, limit=2)] == PROMPTS[:2], name


def test_a_record_has_every_column_of_its_row(write):
    record = {"prompt": "x", "answer": "4", "tests": ["a", None], "level": 3, "extra": {"k": 1.5}}
    rows = list(read_records(Path(write("a.parquet", [record, {**record, "answer": None}])), "prompts"))
    assert [row.fields for row in rows] == [record, {**record, "answer": None}]
    assert rows[1].location.endswith("a.parquet, row 2")
    (row,) = read_records(Path(write("a.csv", [["prompt", "answer"], ["x", "4"]])), "prompts")
    assert row.fields == {"prompt": "x", "answer": "4"}


def test_headers_of_a_csv_may_span_lines_and_follow_blank_ones(pair, write):
    name = write("a.csv", '\n \nprompt;"a note\nof two lines"\r\nThe sea;1\r\n"A;b";2\n')
    assert [prompt.text for prompt in read_prompts(name, pair)] == ["The sea", "A;b"]
    with pytest.raises(SourceError, match="line 5: expected 2 cells"):
        read_prompts(write("b.csv", '\n\nprompt;"a note\nof two lines"\nThe sea\n'), pair)
    with pytest.raises(SourceError, match=r"line 1: it is not CSV \(new-line character"):
        read_prompts(write("c.csv", "prompt,x\rThe sea,1\r"), pair)


def test_two_columns_of_one_name_are_refused(pair, write, tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    write("a.csv", "prompt,prompt\na,b\n")
    for suffix in ("parquet", "arrow", "csv"):
        words = f"a.{suffix} has the column 'prompt' more than once; keep one$"
        with pytest.raises(SourceError, match=words):
            read_prompts(str(tmp_path / f"a.{suffix}"), pair)


def test_images_are_refused_whatever_their_column_is_called(pair, write):
    picture = {"bytes": b"x", "path": "a.png"}
    for value in (picture, [picture, picture]):
        with pytest.raises(SourceError, match="row 1: the record has 'figure_1' beside its text"):
            read_prompts(write("a.parquet", [{"prompt": "The sea", "figure_1": value}]), pair)
    assert read_prompts(write("b.parquet", [{"prompt": "The sea", "figure_1": None}]), pair)
    with pytest.raises(SourceError, match="line 1: the record has 'images' beside its text"):
        read_prompts(write("c.jsonl", {"prompt": "The sea", "images": ["a.png"]}), pair)
    assert read_prompts(write("d.jsonl", {"prompt": "The sea", "images": []}), pair)


def test_cells_may_be_long_and_errors_name_the_line_after_cells_of_several(pair, write):
    name = write("a.csv", [["prompt", "prompt_token_ids"], ["one\ntwo\nthree", ""], ["x", "[1, 999]"]])
    with pytest.raises(SourceError, match=r"a.csv, line 5: expected 'prompt_token_ids'"):
        read_prompts(name, pair)
    name = write("a.csv", [["text"], ["The sea was calm. " * 10_000]])
    assert count_documents(name).total() == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "What is this?\nfoo\n", "is read as CSV, and its first line, 'What"),
        ("a.csv", "prompt,id\nx\n", "line 2: expected 2 cells, as in the header"),
        ("a.csv", 'prompt\n"x"y\n', "line 2: it is not CSV"),
        ("a.csv", "text\nx\n", "line 2: expected a field 'prompt' or"),
        ("a.csv", "messages\nx\n", "line 2: expected 'messages' to be JSON"),
        ("a.csv", "prompt\n\"[{'role': 'user', 'content': 'x'}]\"\n", "to be JSON .* that Python prints are"),
        ("a.csv", b"prompt\nna\xefve\n", "line 2: expected UTF-8 and found byte 0xef"),
        ("a.csv", "prompt\n", "holds no prompt"),
        ("a.parquet", "prompt\nx\n", "cannot be read as Parquet"),
        ("a.parquet", b"PAR1 and nothing that follows PAR1", "cannot be read as Parquet"),
        ("a.json", '{\n "prompt": "x"\n}', "holds .{.*prompt.*; give an array of objects"),
        ("a.json", "[1]", "entry 1: expected an object or a text"),
        ("a.json", "[" * 100_000, "begins as JSON and cannot be read"),
        ("a.txt", "The sea\n".encode("utf-16"), "line 1: expected UTF-8 and found byte 0xff"),
        ("a.txt", b"fine\nnot\0fine\n", "line 2: expected UTF-8 and found byte 0x00"),
        ("a.txt", "one\rtwo\rthree", "line 1: it holds a carriage return"),
        ("a.tar.gz", gzip.compress(bytes(257) + b"ustar  \0", mtime=0), "line 1: expected UTF-8"),
        ("a.arrow", b"ARROW1\0\0", "cannot be read as Arrow"),
        ("a.yaml", "prompt: x\n", "is read as .yaml, and prompts come as JSONL"),
    ],
)
def test_unsupported_formats_are_errors_with_their_name(pair, write, name, content, message, unhooked):
    with pytest.raises(SourceError, match=message):
        read_prompts(write(name, content), pair)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('["The sea", "A boat"]', ["The sea", "A boat"]),
        ('[\n "The sea",\n {"prompt": "A boat"}\n]', ["The sea", "A boat"]),
        ("id,question\n3,The sea\n", ["The sea"]),
        ("[INST] The sea [/INST]\n", ["[INST] The sea [/INST]"]),
        ("ORCAS and seals\n", ["ORCAS and seals"]),
    ],
)
def test_the_content_decides_the_format_without_a_suffix(pair, write, content, texts):
    assert [prompt.text for prompt in read_prompts(write("prompts", content), pair)] == texts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "The sea', "begins as JSON and cannot be read"),
        ('{"prompt": "a"}{"prompt": "b"}', r"begins as JSON and cannot be read \(Extra data"),
        ('[\n{"prompt": "a"},\n]\n', "mend it, or name the file .txt if it is plain text"),
        ('{\n "prompt": "a",\n "b": 2\n}', "holds .{.*prompt.*; give an array of objects"),
        ('["a"] and b', r"begins as JSON and cannot be read \(Extra data"),
    ],
)
def test_what_begins_as_json_is_no_plain_text(pair, write, content, message, unhooked):
    with pytest.raises(SourceError, match=message):
        read_prompts(write("prompts", content), pair)
    assert len(read_prompts(write("prompts.txt", content), pair)) == len(content.splitlines())


def test_two_values_of_one_name_are_refused(pair, write, unhooked):
    for name, content in (
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}\n'),
        ("a.json", '[{"prompt": "b", "prompt": "c"}]'),
    ):
        with pytest.raises(SourceError, match=r"\('prompt' is there twice\)"):
            read_prompts(write(name, content), pair)


def test_a_name_that_is_empty_is_no_folder(monkeypatch, write, tmp_path, unhooked):
    """An unset variable of the shell does not read the data set in the current directory."""
    write("a.jsonl", jsonl({"prompt": "a"}))
    monkeypatch.chdir(tmp_path)
    for name in ("", "  "):
        with pytest.raises(SourceError, match="the name of the source is empty; give a file"):
            find_source(name, "prompts")


def test_a_sentence_with_a_field_name_is_not_a_header(pair, write):
    for first in ("Summarise this, prompt", "text: the sea", "prompt me, please", "Hi"):
        name = write("a.prompts", f"{first}\nThe sea\n")
        assert [one.text for one in read_prompts(name, pair)] == [first, "The sea"]
    assert detect_format(Path(write("b", "prompt,answer\nx,1\n")), "prompts") == "CSV"
    assert detect_format(Path(write("b.txt", "prompt,answer\nx,1\n")), "prompts") == "plain text"


FORMATS = {
    "prompt": {"prompt": [USER]},
    "messages": {"messages": [USER]},
    "completion": {"prompt": [USER], "completion": [ANSWER]},
    "preference": {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
    "without a prompt": {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
}


@pytest.mark.parametrize("record", FORMATS.values(), ids=FORMATS)
def test_trl_formats_give_the_same_prompts(pair, write, record):
    cells = [list(record), [json.dumps(value) for value in record.values()]]
    contents = {"jsonl": jsonl(record), "json": [record], "parquet": [record], "csv": cells}
    for suffix, content in contents.items():
        (prompt,) = read_prompts(write(f"a.{suffix}", content), pair)
        assert prompt.text == "<s>user: Hi\nassistant: "
        assert [dict(message) for message in prompt.messages] == [USER]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_null_keys_that_data_sets_add_to_messages_are_removed(suffix, write):
    calls = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": x}}]}
        for x in ({"a": 1}, {"b": "two"})
    ]
    tool = {"role": "tool", "content": "3", "name": "search"}
    given = [[USER, *calls], [USER, tool, *calls]]
    rows = pa.Table.from_pylist([{"prompt": messages} for messages in given]).to_pylist()
    path = Path(write(f"a.{suffix}", rows if suffix == "parquet" else jsonl(*rows)))
    assert [text_or_messages(row, "prompt") for row in read_records(path, "prompts")] == given


def test_a_prompt_ending_with_an_assistant_message_is_continued(pair, write):
    (prompt,) = read_prompts(write("a.jsonl", jsonl({"prompt": [USER, ANSWER]})), pair)
    assert prompt.text.endswith("assistant: The sea was calm.")
    with pytest.raises(SourceError, match="the last of 'messages' is the assistant's"):
        read_prompts(write("b.jsonl", jsonl({"messages": [USER, ANSWER]})), pair)


def test_responses_are_read_from_trl_formats(pair, write):
    text = {"prompt": "The sea", "response": " was calm"}
    records = [
        text,
        {"prompt": "The sea", "completion": " was calm"},
        {"prompt": "The sea", "chosen": " was calm", "rejected": " was not"},
        {"chosen": "The sea was calm", "rejected": "The sea was not"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"messages": [USER, ANSWER]},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
    ]
    read = list(read_responses(write("a.jsonl", jsonl(*records)), pair))
    same = [one.response_ids for one in read[:3]]
    assert same == [read[0].response_ids] * 3
    assert read[3].response_text == " was not"
    assert [read[4].prompt_text, read[4].response_text] == ["The sea was", " calm"]
    assert read[5].response_text == " not"
    assert [one.prompt_text for one in read[6:]] == ["<s>user: Hi\nassistant: "] * 4
    answer = read[6].response_text
    assert answer.startswith("The sea was calm.")
    assert [one.response_text for one in read[6:]] == [
        answer,
        answer,
        answer,
        answer.replace(ANSWER["content"], OTHER["content"]),
    ]
    assert read[6].response_ids == tuple(tiny_tokenizer()(answer, add_special_tokens=False)["input_ids"])


def test_a_response_of_messages_ends_with_its_end_token(pair, write):
    """Templates write a line end after it, which no policy draws."""
    tokenizer = copy.copy(pair.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    record = {"prompt": [USER], "completion": [ANSWER]}
    (read,) = read_responses(write("a.jsonl", jsonl(record)), replace(pair, tokenizer=tokenizer))
    assert read.response_text == "The sea was calm.</s>"
    assert read.response_ids[-1] == tokenizer.eos_token_id


def test_text_is_read_from_trl_formats(pair, write):
    records = [
        {"text": "The sea was calm"},
        {"prompt": "The sea", "completion": " was calm"},
        {"messages": [USER, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
    ]
    texts = [one.response_text for one in read_text(write("a.jsonl", jsonl(*records)), pair)]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3] and "The sea was calm." in texts[2]
    for name, content in (
        ("a.csv", [["text"], ["The sea was calm"]]),
        ("a.parquet", [{"text": "The sea was calm"}]),
    ):
        assert [one.response_text for one in read_text(write(name, content), pair)] == texts[:1]


def test_every_file_format_gives_the_same_preference_pairs(write):
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    unrendered = {"tools": None, "chat_template_kwargs": {}}
    rows = [list(pairs[0]), list(pairs[0].values())]
    contents = {"a.jsonl": jsonl(*pairs), "a.json": pairs, "a.csv": rows, "a.parquet": pairs}
    for name, content in contents.items():
        assert read_pairs(write(name, content), limit=None) == [{**pairs[0], **unrendered}]
    for row in ({"prompt": "a", "chosen": "b"}, {"prompt": "a", "chosen": "", "rejected": "c"}):
        with pytest.raises(SourceError, match="line 2: expected 'prompt'"):
            read_pairs(write("c.jsonl", jsonl(*pairs, row)), limit=None)
    implicit = write("b.jsonl", jsonl({"chosen": "The sea was", "rejected": "The sea is"}))
    (pair,) = read_pairs(implicit, limit=1)
    assert pair == {"prompt": "The sea", "chosen": " was", "rejected": " is", **unrendered}


def test_pairs_of_conversations_may_repeat_the_prompt_as_text(pair, write):
    """As those of ultrafeedback_binarized do."""
    record = {"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    repeated, plain = (
        [(one.prompt_ids, one.response_ids) for one in read_responses(write("a.jsonl", jsonl(each)), pair)]
        for each in (record, {name: value for name, value in record.items() if name != "prompt"})
    )
    assert repeated == plain and len(plain) == 2
    with pytest.raises(SourceError, match="each a text or each a list of messages"):
        list(read_responses(write("b.jsonl", jsonl({**record, "prompt": "Bye"})), pair))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, "without 'prompt' the other two to begin alike"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' are the same"),
        ({"prompt": "x", "chosen": [ANSWER], "rejected": [OTHER]}, "each a text or each a list of messages"),
        ({"prompt": "x", "chosen": "a", "rejected": ""}, "none of them empty, each a text or each a list"),
        ({"prompt": [USER], "chosen": ["a"], "rejected": ["b"]}, "each message to have a 'role' and"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "each a text or each a list of messages"),
    ],
)
def test_invalid_preference_pairs_are_errors(pair, write, record, message, unhooked):
    for read in (lambda name: read_pairs(name, limit=None), lambda name: list(read_responses(name, pair))):
        with pytest.raises(SourceError, match=message):
            read(write("a.jsonl", jsonl(record)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": [0.5, -0.1]}, "at most 0, and found '0.5'"),
        ({"logprobs": [10**400, -1]}, "at most 0, and found '1000"),
        ({"logprobs": [None, -1]}, "found 'null'"),
        ({"temperature": 10**400}, "'temperature' to be a number from 0 on"),
        ({"prompt_id": 2**70}, "'prompt_id' to be text, or a whole number from 0 to 2147483647"),
        (
            {"prompt_id": 1.0},
            "'prompt_id' to be text, or a whole number from 0 to 2147483647 and found '1.0'",
        ),
        ({"response_token_ids": [2**70]}, "to hold token ids from 0 to 319"),
    ],
)
def test_invalid_numbers_are_errors(pair, write, fields, message, unhooked):
    record = {"prompt": "x", "response_token_ids": [4, 5], **fields}
    with pytest.raises(SourceError, match=message):
        list(read_responses(write("a.jsonl", jsonl(record)), pair))


def test_log_probabilities_of_real_draws_are_accepted(pair, write):
    """Also unlikely ones, and those that rounding put above 0."""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=8.0, size=(200, 320))
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    drawn = [int(rng.choice(320, p=np.exp(row))) for row in logp]
    values = [float(row[token]) for row, token in zip(logp, drawn, strict=True)]
    records = [
        {"prompt": "x", "response_token_ids": drawn[:60], "logprobs": values[:60]},
        {"prompt": "x", "response_token_ids": [4, 5], "logprobs": [5e-4, -30.0]},
    ]
    first, second = read_responses(write("a.jsonl", jsonl(*records)), pair)
    np.testing.assert_allclose(first.logp_sampled, values[:60], rtol=1e-6)
    assert second.logp_sampled.tolist() == [0.0, -30.0]


class Stream:
    """A standard input that is no terminal."""

    def __init__(self, content):
        self.buffer = io.BytesIO(content)


@pytest.fixture
def standard_input(monkeypatch):
    """Sets what standard input holds."""

    def holds(content):
        files._copy_of_standard_input.cache_clear()
        monkeypatch.setattr("sys.stdin", Stream(content) if isinstance(content, bytes) else content)

    yield holds
    files._copy_of_standard_input.cache_clear()


@pytest.mark.parametrize(
    ("content", "where", "record"),
    [
        (b"The sea\n", "line 1", {"prompt": "The sea"}),
        (b'{"prompt": "The sea"}\n', "line 1", {"prompt": "The sea"}),
        (b"prompt,answer\nThe sea,1\n", "line 2", {"prompt": "The sea", "answer": "1"}),
        (b'[\n{"prompt": "The sea"}\n]', "entry 1", {"prompt": "The sea"}),
        (parquet([{"prompt": "The sea"}]), "row 1", {"prompt": "The sea"}),
    ],
)
def test_standard_input_may_have_any_format(pair, standard_input, content, where, record):
    standard_input(content)
    lines = read_records(source_path("-", "prompts"), "prompts")
    assert [(line.location, line.fields) for line in lines] == [(f"standard input, {where}", record)]
    for _ in range(2):  # a source is read more than once
        assert [one.text for one in read_prompts("-", pair)] == ["The sea"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "standard input is empty"),
        (b"a\0b", "standard input, line 1: expected UTF-8"),
        (b"\x1f\x8b...", "standard input cannot be read"),
        (None, "^standard input is closed"),
    ],
)
def test_unreadable_standard_input_is_an_error(pair, standard_input, content, message, unhooked):
    standard_input(content)
    with pytest.raises(SourceError, match=message):
        read_prompts("-", pair)


def test_a_pipe_is_not_opened(pair, tmp_path):
    """It can be read once, and opening it may wait for ever."""
    os.mkfifo(tmp_path / "named")
    with pytest.raises(SourceError, match="named is a pipe or device"):
        read_prompts(str(tmp_path / "named"), pair)


def test_the_copy_of_standard_input_is_deleted_at_exit(tmp_path):
    script = "from kleash.sources.files import source_path\nprint(source_path('-', 'prompts').read_text())"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=b"The sea", capture_output=True, env=environment, check=True)
    assert done.stdout == b"The sea\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        ("prompts", "JSONL, a JSON array, CSV, Parquet or plain text"),
        ("text", "JSONL, a JSON array, CSV, Parquet or plain text"),
        ("responses", "JSONL, a JSON array, CSV or Parquet"),
        ("pairs", "JSONL, a JSON array, CSV or Parquet"),
        ("rollouts", "JSONL, a JSON array or Parquet"),
    ],
)
def test_errors_name_the_formats_that_a_kind_of_source_takes(kind, formats, write):
    contents = {
        "JSONL": ("a.jsonl", '{"prompt": "a"}'),
        "a JSON array": ("a.json", '[{"prompt": "a"}]'),
        "CSV": ("a.csv", "prompt\na"),
        "plain text": ("a.txt", "a"),
    }
    for source_format, (name, content) in contents.items():
        path = Path(write(name, content))
        if source_format in formats:
            assert detect_format(path, kind) == source_format
            continue
        with pytest.raises(
            SourceError, match=f"is read as {source_format}, and {kind} come as {formats}; convert it$"
        ):
            detect_format(path, kind)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"\xef\xbb\xbfThe sea\r\n\n was calm.", "The sea\r\n\n was calm."),
        ("wiki.test.raw.gz", gzip.compress(b" = The sea = \n", mtime=0), " = The sea = \n"),
        ("a.txt", b"The s\xe9a", "line 1: expected UTF-8 and found byte 0xe9"),
        ("a.jsonl", b'{"text": "The sea"}', "is read as JSONL, and texts come as plain text"),
        ("a.csv.gz", gzip.compress(b"text\nx\n", mtime=0), "is read as CSV, and texts come as plain text"),
        ("a.txt", b"", "is empty; give a file of plain text"),
    ],
)
def test_the_whole_text_of_a_file_is_read_or_refused(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    if not expected.startswith((" =", "The")):
        with pytest.raises(SourceError, match=expected):
            read_whole_text(str(path))
        return
    assert read_whole_text(str(path)) == expected
