"""The parts of a run that ``kleash measure --shard i/n`` scores: their folders, and the record of a finished one."""

import re
from dataclasses import dataclass
from pathlib import Path

from kleash.errors import RunFolderError
from kleash.store.checksums import Checksums, write_checked
from kleash.store.codec import to_json
from kleash.store.locks import folder_lock

TASK = "part.json"
"""Written when all shards of a part are on disk."""
FOLDER = re.compile(r"shard-([1-9]\d*)-of-([1-9]\d*)")


@dataclass(frozen=True, kw_only=True)
class ArrayTask:
    """A finished part of a run: every ``count``-th shard from shard ``number - 1`` on."""

    number: int
    """From 1."""
    count: int
    """Parts of the run."""
    shards: int
    """Shards of the whole run."""

    @property
    def indices(self) -> range:
        """The numbers of this part's shards."""
        return range(self.number - 1, self.shards, self.count)

    def write(self, root: Path) -> None:
        """Write ``part.json`` into the folder of the part.

        Raises:
            RunFolderError: if it cannot be written.
        """
        write_checked(root, root / TASK, to_json(self))

    @classmethod
    def read(cls, root: Path) -> "ArrayTask":
        """The record in the folder of a part, as ``part_folders`` lists it.

        Raises:
            RunFolderError: if the part is still being scored, has not finished or is that of another folder, or the
                record is damaged.
        """
        name = root.name.removeprefix("shard-").replace("-of-", "/")
        if not (root / TASK).exists():
            with folder_lock(root, f"wait until part {name} has finished, then merge"):
                raise RunFolderError(
                    f"{root} has not finished; run it again with --shard {name} --resume, then merge"
                )
        task = Checksums.read(root).read_record(cls, root / TASK, "a part of a run")
        if f"{task.number}/{task.count}" != name:
            raise RunFolderError(
                f"{root} holds part {task.number}/{task.count} of a run, as its {TASK} says: the folder was copied or "
                f"renamed; score part {name} into a folder of its own, then merge"
            )
        return task


def part_folders(out: Path) -> list[Path]:
    """The folders of all parts of a run, in order.

    Raises:
        RunFolderError: if there are none, some are missing, or they are of different numbers of parts.
    """
    try:
        matches = {path: FOLDER.fullmatch(path.name) for path in out.iterdir() if path.is_dir()}
    except OSError as error:
        raise RunFolderError(f"{out} cannot be read: {error.strerror or error}") from error
    parts = {path: (int(match[1]), int(match[2])) for path, match in matches.items() if match is not None}
    if not parts:
        raise RunFolderError(
            f"{out} holds no parts of a run, such as shard-1-of-8; score them with kleash measure --shard 1/8 "
            f"--out {out}"
        )
    counts = sorted({count for _, count in parts.values()})
    if len(counts) > 1:
        raise RunFolderError(
            f"{out} holds parts of runs in {' and in '.join(map(str, counts))}; remove those of one of them"
        )
    numbers = {number for number, _ in parts.values()}
    missing = [number for number in range(1, counts[0] + 1) if number not in numbers]
    if missing:
        names = ", ".join(f"shard-{number}-of-{counts[0]}" for number in missing[:10])
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise RunFolderError(
            f"{out} lacks {names}{more}; score them with kleash measure --shard {missing[0]}/{counts[0]} …, then merge"
        )
    return sorted(parts, key=lambda path: parts[path][0])
