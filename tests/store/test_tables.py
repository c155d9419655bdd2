"""Reading Parquet files: without threads that may outlive the interpreter."""

import subprocess
import sys

READER = """
import sys
from pathlib import Path
import numpy as np
import pyarrow.parquet
from kleash.store.tables import encode_table, read_columns
path = Path(sys.argv[1])
columns = {"prompt_id": np.arange(9, dtype="int32"), "text": ["a"] * 9}
path.write_bytes(encode_table(columns, {"prompt_id": "int32", "text": "string"}))

def threads():
    # without those of the allocator of pyarrow
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if not name.startswith("jemalloc")]

before = threads()
read = read_columns(path, ["prompt_id", "text"])
assert len(read["text"]) == 9
print(len(threads()) - len(before))
"""


def test_reading_a_parquet_file_starts_no_thread(tmp_path):
    """A thread of pyarrow that ends after the interpreter aborted 5 % of short commands on a busy machine."""
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "a.parquet")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
