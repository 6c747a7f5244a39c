"""Shards: parts of one job that several machines caption. A merge writes what one machine would have written.

Shard i of n has the videos i, i + n, i + 2n ... of a list that must be the same on every machine. Each shard records a
digest of the list, so that the merge notices a file that only some machines saw.
"""

import glob
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.bulk.spool import FolderError, WorkFolder, differences, read_end, write_atomically
from penstock.bulk.types import Video
from penstock.errors import ConfigError

MOST = 10_000  # a choice; Slurm's arrays end at 1,001 by default
_FROM_ZERO = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")  # of a Slurm array, of an indexed Job of Kubernetes


class Shard(Struct, frozen=True):
    """Part `number`, from 1 on, of `count`. `videos` is the digest of the whole list, once it is known."""

    number: int
    count: int
    videos: str = ""

    def folder(self, output: Path) -> Path:
        """Where the shard keeps its captions."""
        return output.with_name(f"{output.name}.shard-{self.number}-of-{self.count}.work")

    def __str__(self) -> str:
        return f"shard {self.number} of {self.count}"


def shard_of(text: str, environ: Mapping[str, str]) -> Shard:
    """The shard of a flag: `2/8`, or `auto/8` in a Slurm array or an indexed Job of Kubernetes. Raises ConfigError."""
    found = re.fullmatch(r"(auto|\d+)/(\d+)", text)
    if found is None:
        raise ConfigError(f"--shard: found '{text}', expected for instance 2/8, or auto/8 in a Slurm array")
    count = int(found[2])
    if found[1] != "auto":
        number = int(found[1])
    else:
        name = next((name for name in _FROM_ZERO if environ.get(name, "").isdigit()), None)
        if name is None:
            raise ConfigError(f"--shard auto: none of {', '.join(_FROM_ZERO)} is set; write the number, such as 2/8")
        number = int(environ[name]) - int(environ.get("SLURM_ARRAY_TASK_MIN", "0") * (name == _FROM_ZERO[0]) or 0) + 1
    if not 1 <= number <= count <= MOST:
        raise ConfigError(f"--shard: found shard {number} of {count}, expected 1/N to N/N, with N at most {MOST:,}")
    return Shard(number, count)


def take(folder: WorkFolder, videos: Sequence[Video], shard: Shard) -> list[Video]:
    """The shard's part of all videos. Records the shard in its folder. Raises FolderError."""
    record = Shard(shard.number, shard.count, _digest(videos))
    write_atomically(folder.path / "shard.json", msgspec.json.encode(record) + b"\n")
    return list(videos[shard.number - 1 :: shard.count])


def joined(output: Path, opened: ExitStack) -> list[tuple[Video, Path]]:
    """Each video of all shards of an output with its spool, in the order of the whole list.

    `opened` keeps the shards' folders locked. Raises FolderError: a shard is missing, still runs, has unfinished
    videos, or has another list or configuration.
    """
    found: dict[int, tuple[Shard, WorkFolder]] = {}
    for path in sorted(output.parent.glob(f"{glob.escape(output.name)}.shard-*-of-*.work")):
        folder = opened.enter_context(closing(WorkFolder(path)))
        shard = _record(folder)
        first = next(iter(found.values()), (shard, folder))
        if shard.count != first[0].count:
            raise FolderError(f"found {first[0]} and {shard} of {output}: delete the folders of the other division")
        if shard.videos != first[0].videos:
            raise FolderError(f"{first[0]} and {shard} had different lists of videos: run them with the same INPUT")
        if changed := differences(first[1].fingerprint() or {}, folder.fingerprint() or {}):
            raise FolderError(f"{first[0]} and {shard} have different configurations:\n  " + "\n  ".join(changed))
        found[shard.number] = shard, folder
    if not found:
        raise FolderError(f"there are no shards of {output}: run penstock caption with --shard 1/N and -o {output}")
    count = next(iter(found.values()))[0].count
    if missing := [str(n) for n in range(1, count + 1) if n not in found]:
        raise FolderError(f"of {count} shards of {output}, these are missing: {', '.join(missing)}")
    parts = [folder.videos() for _, (_, folder) in sorted(found.items())]
    for number, part in enumerate(parts, 1):
        folder = found[number][1]
        ends = [(video, read_end(folder.spool(video))) for video in part]
        if left := sum(end is None or not end.is_of(video) for video, end in ends):
            raise FolderError(f"{found[number][0]} has {left:,} unfinished videos: run it again to continue")
    total = sum(map(len, parts))
    if any(len(part) != len(range(i, total, count)) for i, part in enumerate(parts)):
        raise FolderError(f"the lists of the shards of {output} do not fit together: run the shards again")
    whole = [(parts[i % count][i // count], found[i % count + 1][1]) for i in range(total)]
    if _digest([video for video, _ in whole]) != found[1][0].videos:
        raise FolderError(f"the lists of the shards of {output} do not fit together: run the shards again")
    return [(video, folder.spool(video)) for video, folder in whole]


def _record(folder: WorkFolder) -> Shard:
    file = folder.path / "shard.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Shard)
    except (OSError, msgspec.DecodeError) as e:
        raise FolderError(f"cannot read {file}: {e}; run this shard again") from None


def _digest(videos: Sequence[Video]) -> str:
    return hashlib.sha256(b"\0".join(video.name.encode() for video in videos)).hexdigest()
