"""Sources in memory: what people have, as records and as the file of a run."""

import datetime
import json

import numpy as np
import pytest

from kleash.errors import RunFolderError, SourceError
from kleash.sources.in_memory import records_in_memory, write_source

TEXTS = ["The sea was calm.", "A boat \ud83d went out."]


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("builtins", lambda _, texts: texts),
        ("builtins", lambda _, texts: iter(texts)),
        ("builtins", lambda _, texts: [{"prompt": text} for text in texts]),
        ("numpy", lambda numpy, texts: numpy.array(texts)),
        ("pandas", lambda pandas, texts: pandas.Series(texts)),
        ("pandas", lambda pandas, texts: pandas.DataFrame({"prompt": texts})),
        ("pyarrow", lambda arrow, texts: arrow.table({"prompt": texts})),
        ("datasets", lambda datasets, texts: datasets.Dataset.from_dict({"prompt": texts})),
    ],
)
def test_every_form_is_read_as_records(package, make):
    data = make(pytest.importorskip(package), ["The sea was calm.", "A boat"])
    assert list(records_in_memory(data, "prompts")) == [{"prompt": "The sea was calm."}, {"prompt": "A boat"}]


def test_texts_are_documents_where_text_is_read_and_messages_are_messages():
    messages = [{"role": "user", "content": "Hi"}]
    assert list(records_in_memory(["a"], "text")) == [{"text": "a"}]
    assert list(records_in_memory([messages], "responses")) == [{"messages": messages}]
    for data, kind in ((["a"], "responses"), (messages, "prompts")):
        with pytest.raises(SourceError, match=f"{kind}, entry 1: expected a.* list of messages or a record"):
            list(records_in_memory(data, kind))


def test_a_frame_without_arrow_is_refused_and_not_read_as_the_names_of_its_columns():
    class Frame(list[str]):
        columns = ("prompt",)

    with pytest.raises(TypeError, match="Arrow"):
        list(records_in_memory(Frame(["prompt"]), "prompts"))


def test_the_file_has_what_json_can_say(tmp_path):
    record = {
        "prompt": TEXTS[1],
        "ids": np.arange(2),
        "day": datetime.date(2026, 1, 2),
        "score": np.float32(0.5),
    }
    write_source([record], "prompts", tmp_path / "run")
    written = json.loads((tmp_path / "run" / "source.jsonl").read_text())
    assert written == {"prompt": TEXTS[1], "ids": [0, 1], "day": "2026-01-02", "score": 0.5}


def test_a_folder_keeps_its_first_source(tmp_path):
    for _ in range(2):
        write_source(["a"], "text", tmp_path)
    with pytest.raises(RunFolderError, match="another source"):
        write_source(["b"], "text", tmp_path)
    assert (tmp_path / "source.jsonl").read_text() == '{"text": "a"}\n'
    (tmp_path / "source.jsonl").rename(tmp_path / "run.json")  # a run of a file
    with pytest.raises(RunFolderError, match="another source"):
        write_source(["a"], "text", tmp_path)
    assert not (tmp_path / "source.jsonl").exists()
