"""Reading Parquet files: without threads that may outlive the interpreter, and without pandas."""

import subprocess
import sys

import numpy as np

from kleash.store.tables import encode_table

READER = """
import sys
from pathlib import Path
import pyarrow.parquet
from kleash.store.tables import read_columns
path = Path(sys.argv[1])

def threads():
    # without those of the allocator of pyarrow
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if not name.startswith("jemalloc")]

before = threads()
read = read_columns(path, ["text", "prompt_id"], lambda path, _: path.read_bytes())
assert [*map(list, read.values())] == [["a"] * 9, [*range(9)]]
print(len(threads()) - len(before), "pandas" in sys.modules)
"""


def test_reading_a_parquet_file_starts_no_thread_and_imports_no_pandas(tmp_path):
    """A thread of pyarrow that ends after the interpreter aborted 5 % of short commands on a busy machine."""
    path, columns = tmp_path / "a.parquet", {"prompt_id": np.arange(9, dtype="int32"), "text": ["a"] * 9}
    path.write_bytes(encode_table(columns, {"prompt_id": "int32", "text": "string"}))
    words = [sys.executable, "-c", READER, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("0 False\n", "")
