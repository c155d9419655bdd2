"""Compressed sources, data sets of several files, columns of usual names, and what the chat template renders."""

import copy
import gzip
import io
import json
import shutil
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest
from damaged_files import outcomes_of_damage
from source_files import jsonl, parquet

from kleash.errors import OptionError, SourceError
from kleash.jobs import MeasureJob, PPOJob
from kleash.jobs.reading import ReadOptions
from kleash.models import describe_source, find_source, read_prompts, read_responses, read_text
from kleash.sources import dataset_folders, files
from kleash.sources.documents import count_documents
from kleash.sources.prompts import count_columns, describe_forms
from kleash.training.with_trl.preferences import read_pairs

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "The sea was calm."}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": ANSWER["content"]}]
RECORDS = [{"prompt": f"The sea {place}", "answer": str(place)} for place in range(5)]
PROMPTS = [record["prompt"] for record in RECORDS]
RENDERED = "<s>user: Hi\nassistant: "


PLAIN_NOTE = (
    "{} prompts are plain text, read without the policy's chat template; --chat-template apply renders them as a "
    "user's message"
)


def zst(content):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def arrow(records, new=pyarrow.ipc.new_stream):
    table, sink = pa.Table.from_pylist(records), io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def texts(name, pair, **values):
    return [prompt.text for prompt in read_prompts(name, pair, reading=ReadOptions(**values))]


def test_every_format_may_be_compressed(pair, write, monkeypatch):
    """By gzip and by zstd, also standard input, and zstd in several frames."""
    rows = "prompt,answer\n" + "".join(f"{one['prompt']},{one['answer']}\n" for one in RECORDS)
    contents = {
        "jsonl": jsonl(*RECORDS),
        "json": json.dumps(RECORDS).encode(),
        "csv": rows.encode(),
        "txt": "\n".join(PROMPTS).encode(),
        "parquet": parquet(RECORDS),
        "arrow": arrow(RECORDS),
    }
    for suffix, content in contents.items():
        for program, packed in (("gz", gzip.compress(content)), ("zst", zst(content))):
            assert texts(write(f"a.{suffix}.{program}", packed), pair) == PROMPTS, (suffix, program)
    frames = b"".join(zst(jsonl(record)) for record in RECORDS)
    assert texts(write("frames.jsonl.zst", frames), pair) == PROMPTS
    skipped = b"\x5a\x2a\x4d\x18\x02\x00\x00\x00ab"  # as pzstd begins a file
    assert texts(write("skippable.jsonl.zst", skipped + frames), pair) == PROMPTS
    with pytest.raises(SourceError, match=r"twice.jsonl.gz, line 1: expected UTF-8"):
        texts(write("twice.jsonl.gz", gzip.compress(gzip.compress(jsonl(*RECORDS)))), pair)
    assert texts(write("feather", arrow(RECORDS, pyarrow.ipc.new_file)), pair) == PROMPTS
    assert texts(write("stream", arrow(RECORDS)), pair) == PROMPTS
    assert count_documents(write("text.gz", gzip.compress(b"one\n\ntwo\nlines\n"))).total() == 2
    for packed in (gzip.compress(jsonl(*RECORDS)), zst(contents["csv"])):
        files._copy_of_standard_input.cache_clear()
        monkeypatch.setattr("sys.stdin", type("Stream", (), {"buffer": io.BytesIO(packed)})())
        assert texts("-", pair) == PROMPTS
    files._copy_of_standard_input.cache_clear()


def test_damaged_compressed_and_arrow_files_are_read_or_refused(pair, write):
    whole = jsonl(*RECORDS)
    for name, content in (("a.jsonl.gz", gzip.compress(whole)), ("a.jsonl.zst", zst(whole))):
        with pytest.raises(SourceError, match="cannot be read"):
            read_prompts(write(name, content[:-12]), pair)
    many = RECORDS * 8
    contents = {
        "a.jsonl.gz": gzip.compress(jsonl(*many)),
        "a.jsonl.zst": zst(jsonl(*many)),
        "a.arrow": arrow(many),
        "b.arrow": arrow(many, pyarrow.ipc.new_file),
        "a.parquet": parquet(many),
        "a.csv": b"prompt,answer\n" + b"".join(b"The sea,%d\n" % place for place in range(40)),
        "a.json": json.dumps(many).encode(),
    }
    refused = 0
    for name, content in contents.items():
        path = Path(write(name, content))
        outcomes, failures = outcomes_of_damage(path, len(content), lambda file: texts(str(file), pair), 60)
        assert failures == [], name
        refused += outcomes["refused"]
    assert refused > 150


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders that ``save_to_disk`` and ``to_parquet`` wrote, and the package that wrote them."""
    datasets = pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("saved")
    data = datasets.Dataset.from_list(RECORDS)
    small = data.select(range(2))
    data.save_to_disk(str(root / "one"), num_shards=2)
    datasets.DatasetDict({"test": small, "train": data}).save_to_disk(str(root / "several"))
    datasets.DatasetDict({"a": small, "b": data}).save_to_disk(str(root / "unusual"))
    hub = root / "user" / "name"
    (hub / "data").mkdir(parents=True)
    data.select(range(3)).to_parquet(hub / "data/train-00000-of-00002.parquet")
    data.select(range(3, 5)).to_parquet(hub / "data/train-00001-of-00002.parquet")
    small.to_parquet(hub / "data/test-00000-of-00001.parquet")
    configs = root / "user" / "configs"
    for name in ("main", "hard"):
        (configs / name).mkdir(parents=True)
        (configs / name / "train.jsonl").write_bytes(jsonl(*RECORDS[: 2 if name == "hard" else 5]))
    lines = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("main", "hard"))
    (configs / "README.md").write_text(f"---\nconfigs:\n{lines}---\n")
    return root


def test_splits_of_saved_data_sets_are_read(pair, saved, monkeypatch):
    monkeypatch.chdir(saved)
    assert texts("one", pair) == PROMPTS
    assert texts("several", pair) == texts("several", pair, split="train") == PROMPTS
    assert texts("several", pair, split="test") == PROMPTS[:2]
    assert texts("user/name", pair) == PROMPTS
    assert texts("user/name", pair, split="test") == PROMPTS[:2]
    assert texts("user/configs", pair, dataset_config="hard") == PROMPTS[:2]
    (note,) = describe_source("prompts", "several")
    assert note == "the split 'train' of several is read, of 'test', 'train'; --split names another"
    assert not describe_source("prompts", "several", ReadOptions(split="test"))
    assert not describe_source("prompts", "one")
    read = read_prompts("user/name", pair)
    assert read[3].location.endswith("train-00001-of-00002.parquet, row 1")
    monkeypatch.chdir("user/name")
    assert texts(".", pair) == PROMPTS


def test_files_of_another_format_in_a_folder_are_noted(pair, write, tmp_path):
    """The package datasets reads the commonest format alone."""
    pytest.importorskip("datasets")
    for name in ("d/a.jsonl", "d/b.jsonl", "d/.hidden/c.csv"):
        write(name, jsonl(RECORDS[0]))
    folder = str(tmp_path / "d")
    assert describe_source("prompts", folder) == ()
    write("d/e.jsonl", jsonl(RECORDS[0]))  # as a notebook may, between two measurements
    write("d/c.csv", "prompt\nA boat\n")
    write("d/sub/d.parquet", parquet(RECORDS))
    assert texts(folder, pair) == PROMPTS[:1] * 3
    assert describe_source("prompts", folder) == (
        f"files of another format in {folder} are not read: 'c.csv' and 1 more",
    )


def test_the_hash_of_a_data_set_follows_the_files_of_its_split(saved, monkeypatch):
    monkeypatch.chdir(saved)
    train, test = (
        find_source("user/name", "prompts", ReadOptions(split=split)) for split in ("train", "test")
    )
    parts = [sha256(path.read_bytes()).hexdigest() for path in sorted(Path("user/name/data").glob("train*"))]
    assert train.sha256() == sha256("\n".join(parts).encode()).hexdigest()
    assert test.sha256() == sha256(next(Path("user/name/data").glob("test*")).read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("several", {"split": "dev"}, "several has no split 'dev'; there"),
        ("several", {"dataset_config": "x"}, "was written by save_to_disk"),
        ("unusual", {}, "unusual has the splits 'a', 'b'; name one"),
        ("user/name", {"split": "dev"}, "user/name has no split 'dev'; there"),
        ("user/name", {"dataset_config": "x"}, "user/name cannot be read as a data set"),
        ("user/configs", {}, "user/configs cannot be read as a data set"),
        ("trl-lib/tldr", {}, "there is no file trl-lib/tldr, and the hub"),
        ("trl-lib/tldr.jsonl.gz", {}, "there is no file trl-lib/tldr.jsonl.gz$"),
        ("shipped:prompts", {"split": "x"}, "is one file, which has no 'x'; leave --split out"),
        ("missing/shard", {}, "missing/shard has 1 of the 2 files"),
        ("broken/state", {}, "broken/state cannot be read: "),
        ("broken/splits", {}, "broken/splits cannot be read: "),
    ],
)
def test_splits_and_files_that_are_not_there_are_refused(
    pair, saved, monkeypatch, name, values, message, unhooked
):
    monkeypatch.chdir(saved)
    broken = {
        "missing/shard": {"data/train-00000-of-00002.parquet": parquet(RECORDS)},
        "broken/state": {"state.json": "[]"},
        "broken/splits": {"dataset_dict.json": '{"splits": ["../one"]}'},
    }
    for file, content in broken.get(name, {}).items():
        path = saved / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SourceError, match=message):
        texts(name, pair, **values)


def test_data_sets_without_their_package_are_refused_with_the_extra(saved, monkeypatch):
    monkeypatch.chdir(saved)
    monkeypatch.setattr("kleash.sources.dataset_folders.is_installed", lambda module: False)
    dataset_folders._splits.cache_clear()
    for name in ("user/other", "user/name"):
        with pytest.raises(SourceError, match=r"the package datasets .* pip install"):
            find_source(name, "prompts")


@pytest.mark.parametrize("outside", ["../one/data-00000-of-00002.arrow", "/etc/data.arrow"])
def test_files_outside_of_a_saved_data_set_are_refused(pair, saved, tmp_path, outside, unhooked):
    folder = shutil.copytree(saved / "one", tmp_path / "copy")
    shutil.copytree(saved / "one", tmp_path / "one")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": outside}]}))
    with pytest.raises(SourceError, match=r"which is not in it|cannot be read"):
        texts(str(folder), pair)


def test_the_hubs_cache_is_read_without_a_network(tmp_path, monkeypatch, pair):
    """As ``hf download`` leaves it."""
    hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("datasets")
    commit = "0123456789" * 4
    repo = tmp_path / "datasets--someone--prompts"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    data = repo / "snapshots" / commit / "data"
    data.mkdir(parents=True)
    (data / "train-00000-of-00001.parquet").write_bytes(parquet(RECORDS))
    download = hub.snapshot_download
    monkeypatch.setattr(hub, "snapshot_download", lambda *a, **k: download(*a, cache_dir=tmp_path, **k))
    assert texts("someone/prompts", pair) == PROMPTS


@pytest.mark.parametrize(
    ("record", "values", "prompt"),
    [
        ({"question": "Q", "answer": "A"}, {}, "Q"),
        ({"instruction": "Q", "input": "I", "output": "A"}, {}, "Q\n\nI"),
        ({"instruction": "Q", "input": "I"}, {"prompt_column": "instruction"}, "Q"),
        ({"prompt": "P", "messages": [USER]}, {"prompt_column": "prompt"}, "P"),
        ({"odd name, really": "Q", "text": "T"}, {"prompt_column": "odd name, really"}, "Q"),
        ({"question": "Q", "chosen": "Qa", "rejected": "Qb"}, {}, "Q"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, {}, RENDERED),
        ({"prompt": "P", "messages": [USER]}, {"prompt_column": "messages"}, RENDERED),
        ({"dialogue": [USER]}, {"prompt_column": "dialogue"}, RENDERED),
    ],
)
def test_prompts_are_found_by_usual_or_named_columns(pair, write, record, values, prompt):
    for name, content in (("a.jsonl", jsonl(record)), ("a.parquet", parquet([record]))):
        assert texts(write(name, content), pair, **values) == [prompt]


def test_columns_of_a_csv_are_found_too(pair, write):
    assert texts(write("a.csv", "question;answer\nQ;A\n"), pair) == ["Q"]
    assert texts(write("b", "question,answer\nQ,A\n"), pair) == ["Q"]
    assert texts(write("c", "question\nQ\n"), pair) == ["question", "Q"]
    assert texts(write("c", "question\nQ\n"), pair, prompt_column="question") == ["Q"]
    assert texts(write("d.csv", "odd,other\nQ,A\n"), pair, prompt_column="odd") == ["Q"]
    cell = json.dumps(json.dumps([USER])).replace('\\"', '""')
    assert texts(write("e.csv", f"talk,n\n{cell},1\n"), pair, prompt_column="talk") == [RENDERED]


@pytest.mark.parametrize(
    ("record", "values", "expected"),
    [
        ({"question": "The sea", "answer": " was calm"}, {}, [" was calm"]),
        ({"instruction": "The sea", "input": "", "output": " was calm"}, {}, [" was calm"]),
        ({"prompt": "The sea", "responses": [" was calm", " was not"]}, {}, [" was calm", " was not"]),
        ({"prompt": "The", "answer": "42", "draft": " sea"}, {"response_column": "draft"}, [" sea"]),
        ({"prompt": "The", "chosen": " a", "rejected": " b"}, {"response_column": "rejected"}, [" b"]),
        ({"question": "Q", "chosen": " a", "rejected": " was"}, {}, [" a", " was"]),
        ({"prompt": "x", "messages": [USER, ANSWER]}, {"prompt_column": "messages"}, ["The sea was calm."]),
        ({"input": "The sea", "output": " was calm"}, {}, [" was calm"]),
        ({"conversations": SHAREGPT}, {}, ["The sea was calm."]),
    ],
)
def test_responses_are_found_by_usual_or_named_columns(pair, write, record, values, expected):
    read = read_responses(write("a.jsonl", jsonl(record)), pair, reading=ReadOptions(**values))
    assert [one.response_text.removesuffix("</s>").rstrip("\n") for one in read] == expected


def test_lists_of_responses_in_a_csv_are_json(pair, write, unhooked):
    header = "prompt,completions\nThe sea,"
    lists = read_responses(write("a.csv", header + '"["" was"", "" is""]"\nA boat,[1] is cited\n'), pair)
    assert [(one.prompt_text, one.response_text) for one in lists] == [
        ("The sea", " was"),
        ("The sea", " is"),
        ("A boat", "[1] is cited"),
    ]
    with pytest.raises(SourceError, match="line 2: expected 'completions' to be JSON"):
        list(read_responses(write("b.csv", header + "\"[' was', ' is']\"\n"), pair))


def test_a_record_has_one_response(pair, write, unhooked):
    name = write("a.jsonl", jsonl({"prompt": "P", "response": " a", "completion": " b"}))
    with pytest.raises(SourceError, match="line 1: expected 'response' or 'completion'"):
        list(read_responses(name, pair))
    (chosen,) = read_responses(name, pair, reading=ReadOptions(response_column="completion"))
    assert chosen.response_text == " b"
    of_others = dict.fromkeys(("response", "response_token_ids", "chosen", "rejected"))
    logs = [
        {"completion": " b", **of_others, "prompt": "P"},
        {"prompt": None, "chosen": "P b", "rejected": "P c"},
    ]
    merged = read_responses(write("merged.jsonl", jsonl(*logs)), pair)
    assert [one.response_text for one in merged] == [" b", " b", " c"], "a frame of two logs has nulls"


def test_texts_are_found_by_usual_or_named_columns(pair, write):
    for record, values in (
        ({"content": "The sea"}, {}),
        ({"title": "x", "article": "The sea"}, {}),
        ({"text": "other", "body": "The sea"}, {"text_column": "body"}),
        ({"Text": "The sea"}, {}),
    ):
        (window,) = read_text(write("a.jsonl", jsonl(record)), pair, reading=ReadOptions(**values))
        assert window.response_text.endswith("sea"), record


def test_choices_of_columns_are_noted(write):
    name = write("a.jsonl", jsonl({"question": "Q", "query": "R", "answer": "A"}))
    assert describe_source("prompts", name) == (
        "prompts are read from 'question'; 'query' could be meant too; --prompt-column names another column",
    )
    (note,) = describe_source("responses", name, ReadOptions(prompt_column="query"))
    assert note == "responses are read from 'answer'; --response-column names another column"
    (note,) = describe_source("text", write("b.jsonl", jsonl({"content": "Q"})))
    assert note == "texts are read from 'content'; --text-column names another column"
    pair = {"question": "Q", "chosen": "R", "rejected": "S"}
    (note,) = describe_source("pairs", write("d.jsonl", jsonl(pair)))
    assert note == "prompts are read from 'question'; call another one 'prompt' if it is meant"
    assert describe_source("prompts", write("c.jsonl", jsonl({"prompt": "Q", "question": "R"}))) == ()


@pytest.mark.parametrize(
    ("content", "values", "message"),
    [
        (jsonl({"a": 1, "b": 2}), {}, "expected a field 'prompt' or 'messages'"),
        (jsonl({"a": 1, "b\x1b": 2}), {"prompt_column": "c"}, "line 1: there is no column 'c'; there"),
        (jsonl({"prompt": "x"}, {"q": "y"}), {"prompt_column": "prompt"}, "line 2: there is no column"),
        (jsonl({"a": 3}), {"prompt_column": "a"}, "expected 'a' to be text or a list"),
        (jsonl({f"c{n}": 1 for n in range(20)}), {"prompt_column": "a"}, "'c15' and 4 more: give one"),
        (jsonl({"prompt": "x", "messages": [USER]}), {}, "found both; keep one, or choose by"),
        (jsonl({"prompt": "x"}, {"question": "y"}), {}, "line 2: expected a field 'prompt' or"),
    ],
)
def test_columns_that_are_not_there_are_refused_with_those_that_are(
    pair, write, content, values, message, unhooked
):
    with pytest.raises(SourceError, match=message):
        texts(write("a", content), pair, **values)


def test_reward_functions_see_the_columns_of_the_source(pair, write):
    name = write("a.jsonl", jsonl({"question": "Q", "answer": "A"}))
    (prompt,) = read_prompts(name, pair, columns=True)
    assert prompt.columns == {"question": "Q", "answer": "A"}
    assert list(count_columns(name)) == ["question", "answer"]


def test_pairs_are_read_beside_a_question(write):
    name = write("a.jsonl", jsonl({"question": "Q", "chosen": "a", "rejected": "b"}))
    assert read_pairs(name, limit=None)[0].items() >= {"prompt": "Q", "chosen": "a", "rejected": "b"}.items()


def test_the_chat_template_renders_messages_all_prompts_or_nothing(pair, write):
    name = write("a.jsonl", jsonl({"prompt": "Hi"}, {"prompt": [{"role": "system", "content": "Be"}, USER]}))
    rendered = "<s>system: Be\nuser: Hi\nassistant: "
    assert texts(name, pair) == ["Hi", rendered]
    applied = read_prompts(name, pair, reading=ReadOptions(chat_template="apply"))
    assert [one.text for one in applied] == [RENDERED, rendered]
    assert applied[0].messages == (USER,)
    raw = read_prompts(name, pair, reading=ReadOptions(chat_template="raw"))
    assert [one.text for one in raw] == ["Hi", "Be\n\nHi"]
    assert raw[1].messages is None
    plain = write("a.txt", "Hi\n")
    assert texts(plain, pair, chat_template="apply") == [RENDERED]
    bare = replace(pair, tokenizer=copy.copy(pair.tokenizer))
    bare.tokenizer.chat_template = None
    with pytest.raises(SourceError, match="line 1: a chat template renders its 'prompt'"):
        texts(plain, bare, chat_template="apply")
    picture = {"role": "user", "content": [{"type": "text", "text": 3}]}
    with pytest.raises(SourceError, match="expected the contents of 'messages' to be"):
        texts(write("b.jsonl", jsonl({"messages": [picture]})), pair, chat_template="raw")


def test_a_rendered_conversation_as_text_has_the_tokens_of_its_template_alone(pair, write):
    conversation = [USER, ANSWER]
    (window,) = read_text(write("a.jsonl", jsonl({"messages": conversation})), pair)
    rendered = pair.tokenizer.apply_chat_template(conversation, tokenize=False)
    token_ids = pair.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert [*window.prompt_ids, *window.response_ids] == token_ids
    assert token_ids.count(pair.tokenizer.bos_token_id) == 1
    plain, begun = (
        next(read_text(write("b.jsonl", jsonl({"text": start + "The sea"})), pair)) for start in ("", "<s>")
    )
    assert [*plain.prompt_ids, *plain.response_ids] == [*begun.prompt_ids, *begun.response_ids]


def test_the_template_is_given_the_tools_and_variables_of_a_record(pair, write):
    told = replace(pair, tokenizer=copy.copy(pair.tokenizer))
    told.tokenizer.chat_template = (
        "{{ tools | tojson }}{{ mood }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": None}}
    call = {"role": "assistant", "tool_calls": [{"type": "function"}]}
    record = {"messages": [USER, call, {"role": "tool", "content": "3"}], "tools": [tool]}
    expected = '[{"type": "function", "function": {"name": "f"}}]calmHi[{\'type\': \'function\'}]3'
    for variables, tools in (({"mood": "calm"}, [tool]), ('{"mood": "calm"}', json.dumps([tool]))):
        name = write("a.jsonl", jsonl({**record, "tools": tools, "chat_template_kwargs": variables}))
        assert texts(name, told) == [expected]
    for values, message in (
        ({"tools": "a hammer"}, "expected 'tools' to be a list of JSON schemas and found .*leave the column"),
        ({"chat_template_kwargs": {"tokenize": True}}, "expected 'chat_template_kwargs' to be an object"),
    ):
        with pytest.raises(SourceError, match=f"line 1: {message}"):
            texts(write("b.jsonl", jsonl({**record, **values})), told)


def test_responses_and_texts_follow_the_chat_template(pair, write):
    name = write(
        "a.jsonl", jsonl({"prompt": [USER], "completion": [ANSWER]}, {"prompt": "Hi", "completion": " x"})
    )
    plain, applied, raw = (
        list(read_responses(name, pair, reading=ReadOptions(chat_template=kind)))
        for kind in (None, "apply", "raw")
    )
    assert [one.prompt_text for one in plain] == [RENDERED, "Hi"]
    assert [one.prompt_text for one in applied] == [RENDERED] * 2
    assert [(one.prompt_text, one.response_text) for one in raw] == [
        ("Hi", "The sea was calm."),
        ("Hi", " x"),
    ]
    conversation = write("b.jsonl", jsonl({"messages": [USER, ANSWER]}))
    (window,) = read_text(conversation, pair, reading=ReadOptions(chat_template="raw"))
    read = pair.tokenizer.decode([*window.prompt_ids, *window.response_ids])
    assert read.endswith("Hi\n\nThe sea was calm.")


def test_what_is_templated_is_noted(pair, write):
    name = write("a.jsonl", jsonl({"prompt": "Hi"}, {"prompt": [USER]}, {"prompt_token_ids": [5]}))

    def notes(source, tokenizer=pair.tokenizer, **values):
        reading = ReadOptions(**values)
        prompts = read_prompts(source, replace(pair, tokenizer=tokenizer), reading=reading)
        return describe_forms("prompts", Counter(one.form for one in prompts), tokenizer, reading)

    assert notes(name) == (
        "1 of the 3 prompts are messages, rendered by the policy's chat template",
        PLAIN_NOTE.format("1 of the 3"),
    )
    assert notes(name, chat_template="apply")[1] == (
        "1 of the 3 prompts are plain text, rendered as a user's message by the policy's chat template"
    )
    (raw,) = notes(name, chat_template="raw")
    assert raw.startswith("1 of the 3 prompts are messages, whose contents are joined")
    text = count_documents(write("b.jsonl", jsonl({"text": "x"}, {"messages": [USER]})), pair.tokenizer)
    assert describe_forms("text", text, pair.tokenizer) == (
        "1 of the 2 documents are messages, rendered by the policy's chat template",
    )
    bare = copy.copy(pair.tokenizer)
    bare.chat_template = None
    assert notes(write("c.txt", "Hi\n"), bare) == ()
    one = write("d.jsonl", jsonl({"system": "Be brief", "messages": [USER]}))
    assert describe_source("prompts", one) == (
        "the column 'system' is not read; put it into the messages, as the first, of the role system",
    )
    assert notes(one) == ("the prompt is a list of messages, rendered by the policy's chat template",)


def test_options_of_reading_are_checked_and_are_settings_of_the_run():
    with pytest.raises(OptionError, match="--chat-template must be one of apply, raw"):
        MeasureJob(chat_template="none")
    with pytest.raises(OptionError, match="--prompt-column must be a name"):
        PPOJob(prompt_column="")
    reading = {"split": "test", "text_column": "t", "chat_template": "raw"}
    job = MeasureJob(prompts="x", policy="p", reference="r", **reading)
    assert reading.items() <= job.settings().items()
    assert job.without_effect() == ("--text-column does nothing with --prompts",)
    job = MeasureJob(text="x", policy="p", reference="r", chat_template="apply")
    assert job.without_effect() == (
        "--chat-template apply does nothing with --text, which is not asked of a model",
    )
