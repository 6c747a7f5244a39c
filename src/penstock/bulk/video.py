"""A video file: its container, the video stream that is read, and its header; and the videos that a job finds."""

import fnmatch
import glob
import hashlib
import logging
import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, BinaryIO, Literal

from msgspec import Struct

from penstock.bulk.types import Video
from penstock.bulk.urls import READ_BYTES, RemoteFile, check_allowed, is_url, url_name
from penstock.errors import PenstockError
from penstock.plugins import optional_module

_logger = logging.getLogger("penstock.bulk")

Stage = Literal["open", "read", "decode"]

OPEN_OPTIONS = {"protocol_whitelist": "file"}  # a playlist disguised as a video reaches no network
DECODE_OPTIONS = {"max_pixels": str(8192 * 8192)}
STRICT_OPTIONS = {"err_detect": "explode"}  # damage is an error, not guessed pixels
CONCURRENT_BYTES = 128 << 20  # each decoder thread holds two frames: 21 threads at 1920x1080, 5 at 3840x2160
KEYFRAME_S = 2.0  # a usual distance of keyframes in streams; files for download have longer ones
UNTIMED = 0x0200 | 0x0080  # AVFMT_TS_DISCONT, AVFMT_NOTIMESTAMPS: packets have no time to rely on
H264_MAX_REORDER = 15  # frames that FFmpeg's H.264 decoder can hold back
NOT_VIDEOS = {"hls", "dash", "concat", "imf", "tty", "ffmetadata", "webvtt", "srt", "ass"}
STILL_IMAGES = ("image2", "_pipe", "gif_pipe")


class VideoError(PenstockError, code="video"):
    """A video cannot be opened, or is damaged from `frame` on."""

    def __init__(self, message: str, *, stage: Stage = "decode", frame: int | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.stage = stage
        self.frame = frame

    def __reduce__(self) -> tuple[Any, ...]:
        make, fields, state = super().__reduce__()
        return make, fields, {**state, "stage": self.stage, "frame": self.frame}


class VideoProbe(Struct, frozen=True):
    """The statements of a container's header: hints, never promises. `frames` is 0 if the header has no count.

    `keyframes` is a guess unless the header has an index of all frames.
    """

    frames: int
    duration_s: float | None
    width: int
    height: int
    codec: str
    keyframes: int = 0


def av_library() -> ModuleType:
    """PyAV. Raises ConfigError if it is not installed."""
    return optional_module("av", "PyAV is not installed; videos need it", "video")


def probe(path: str, stream: int | None = None) -> VideoProbe:
    """The statements of the video's header. Raises VideoError."""
    if is_image(path):
        return _probe_image(path)
    opened = OpenVideo(path, threads=1, stream=stream)
    try:
        found = opened.stream
        duration_s = float(found.duration * found.time_base) if found.duration else None
        if duration_s is None and opened.container.duration:
            duration_s = opened.container.duration / 1_000_000
        frames = found.frames
        if not frames and duration_s and found.average_rate:
            frames = round(duration_s * found.average_rate)
        context, index = found.codec_context, found.index_entries
        keyframes = sum(entry.is_keyframe for entry in index)
        if len(index) != frames and duration_s:
            keyframes = math.ceil(duration_s / KEYFRAME_S)
        return VideoProbe(frames, duration_s, context.width, context.height, context.name, keyframes)
    finally:
        opened.close()


def _probe_image(path: str) -> VideoProbe:
    require_regular_file(path)
    av = av_library()
    try:
        with av.open("file:" + path, container_options=dict(OPEN_OPTIONS)) as container:
            context = container.streams.video[0].codec_context
            return VideoProbe(1, None, context.width, context.height, context.name)
    except (OSError, ValueError, IndexError, av.error.FFmpegError) as error:
        raise VideoError(f"cannot be opened as an image: {reason(error)}", stage="open", detail=path) from error


class OpenVideo:
    """An open container and the one video stream that is read: `stream`, by its index, or the best.

    Raises VideoError, stage "open", if there is no such stream.

    A `tolerant` decoder goes on after damage and marks the frames in which it guesses pixels; otherwise damage is an
    error.
    """

    def __init__(self, path: str, threads: int, *, tolerant: bool = False, stream: int | None = None) -> None:
        av = av_library()
        self._remote: RemoteFile | None = None
        options = {"container_options": dict(OPEN_OPTIONS), "metadata_errors": "replace"}
        try:
            if is_url(path):
                self._remote = RemoteFile(path, partial(VideoError, stage="read"))
                self.container = av.open(self._remote, buffer_size=READ_BYTES, **options)
            else:
                require_regular_file(path)
                # "file:" because a name may look like a protocol or begin with "-"
                self.container = av.open("file:" + path, **options)
        except BaseException as error:
            self._close_remote()
            if not isinstance(error, (OSError, ValueError, av.error.FFmpegError)):
                raise
            raise VideoError(f"cannot be opened as a video: {reason(error)}", stage="open", detail=path) from error
        try:
            self.stream = self._choose_stream(av, path, stream)
            self._configure_decoder(threads, DECODE_OPTIONS if tolerant else DECODE_OPTIONS | STRICT_OPTIONS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the container and its decoder."""
        self.container.close()
        self._close_remote()

    def _close_remote(self) -> None:
        if self._remote is not None:
            self._remote.close()

    @property
    def tick_s(self) -> float:
        """The unit of the stream's times."""
        return float(self.stream.time_base or 0)

    def _choose_stream(self, av: ModuleType, path: str, index: int | None) -> Any:
        name = self.container.format.name
        if name in NOT_VIDEOS or name.endswith(STILL_IMAGES):
            raise VideoError(f"is not a video, but {name}", stage="open", detail=path)
        kind = av.stream.Disposition
        pictures = kind.attached_pic | kind.timed_thumbnails
        every = self.container.streams.video
        videos = [s for s in every if (s.index == index if index is not None else not s.disposition & pictures)]
        if not videos and index is not None:
            found = ", ".join(str(s.index) for s in every) or "none"
            raise VideoError(
                f"its stream {index} is not a video; its video streams: {found}", stage="open", detail=path
            )
        if not videos:
            kinds = sorted({"cover art" if s.type == "video" else s.type for s in self.container.streams}) or ["none"]
            raise VideoError(f"has no video stream; its streams: {', '.join(kinds)}", stage="open", detail=path)
        best = self.container.streams.best("video")
        stream = best if best in videos else videos[0]
        if stream.codec_context is None:
            raise VideoError("its codec cannot be decoded by this FFmpeg", stage="open", detail=path)
        others = [s.index for s in every if s is not stream]
        if others:
            _logger.info("event=video_streams path=%r chosen=%d others=%s", path, stream.index, others)
        return stream

    def _configure_decoder(self, threads: int, options: dict[str, str]) -> None:
        context = self.stream.codec_context
        self.reorder_depth: int = context.reorder_depth  # as FFmpeg found it in the first frames
        frame_bytes = max(1, context.width * context.height * 3 // 2)
        self.threads = max(1, min(threads, CONCURRENT_BYTES // (2 * frame_bytes)))
        if context.name == "h264":
            # Reorder as the standard allows. FFmpeg's guess can cost a frame, and would differ after a seek.
            options = options | {"strict": "strict"}
            # A deeper reorder buffer changes which frames survive a lost keyframe if packets have no reliable times.
            if self.container.format.flags & UNTIMED:
                self.threads = 1
            # One thread reads whether a frame of another is damaged when it shows that frame, even if the other still
            # decodes it. With this depth, a frame is shown when its thread decodes the next one.
            self.threads = max(1, min(self.threads, H264_MAX_REORDER - context.reorder_depth))
            if self.threads > 1:
                context.reorder_depth += self.threads
        context.thread_count = self.threads
        context.thread_type = "AUTO" if self.threads > 1 else "SLICE"
        context.options = options


def require_regular_file(path: str) -> None:
    """Raises VideoError for files on which FFmpeg would wait, such as a pipe, or report little."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError) as error:
        raise VideoError(f"cannot be opened: {reason(error)}", stage="open", detail=path) from error
    if not regular:
        raise VideoError("is not a regular file", stage="open", detail=path)


def reason(error: BaseException) -> str:
    """The message of FFmpeg or the system, without the path."""
    strerror = getattr(error, "strerror", None)
    return str(strerror or error)


# ---- the videos of a job

_VIDEO_SUFFIXES = (
    ".264 .265 .3g2 .3gp .asf .av1 .avi .divx .dv .f4v .flv .gif .gxf .h264 .h265 .hevc .ivf .m1v .m2t .m2ts .m2v .m4v "
    ".mj2 .mjpeg .mjpg .mkv .mov .mp4 .mpe .mpeg .mpg .mpv .mts .mxf .nut .obu .ogm .ogv .qt .rm .rmvb .ts .vob .webm "
    ".wmv .wtv .y4m "
)
_OTHER_SUFFIXES = (  # text, pictures, sound and data: not worth opening
    ".aac .ass .avif .bmp .csv .doc .docx .exe .flac .gz .heic .heif .htm .html .ini .jpeg .jpg .json .jsonl .lnk .log "
    ".m3u .m3u8 .md .md5 .mp3 .nfo .npy .npz .opus .parquet .part .pdf .pickle .pkl .png .pt .py .sha256 .sh "
    ".safetensors .srt .sub .svg .tar .tfrecord .tif .tiff .tmp .toml .torrent .tsv .txt .vtt .wav .webp .xml .yaml "
    ".yml .zip "
)
IMAGE_SUFFIXES = frozenset([".avif", ".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"])
VIDEO_SUFFIXES, OTHER_SUFFIXES = frozenset(_VIDEO_SUFFIXES.split()), frozenset(_OTHER_SUFFIXES.split())


class InputError(PenstockError, code="input"):
    """A named input does not exist."""


def is_image(path: str) -> bool:
    """Whether the file is read as an image, by its suffix. URLs are videos."""
    return not is_url(path) and os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES


class InputNotes(Struct):
    """Files that did not become videos: the number `skipped`, and the names of `duplicates`."""

    skipped: int = 0
    duplicates: list[str] = []


def expand(
    inputs: Iterable[str],
    *,
    stdin: BinaryIO | None = None,
    from0: bool = False,
    extensions: frozenset[str] = frozenset(),
    allowed_urls: Sequence[str] = (),
) -> tuple[list[Video], InputNotes]:
    """The videos in the order of their inputs, each file once and folders sorted; and notes on the other files.

    An input is a file, a folder (with everything below it), a pattern (`**` matches any folders), a URL that begins
    with one of `allowed_urls`, or `-` for the lines of `stdin` (separated by NUL if `from0`), each a file, folder or
    URL. Of folders and patterns, `extensions` select the files, such as ".mp4"; without any, those that are videos or,
    if there is no video, images. A file that cannot be examined becomes a video of size 0: opening it fails and gives
    the reason. Raises InputError for an input without any file, ConfigError for a URL that is not allowed.
    """
    notes = InputNotes()
    files: dict[tuple[int, ...] | str, Video] = {}  # on some network disks device and inode do not identify a file
    names: set[str] = set()
    folders: set[tuple[int, int]] = set()
    pictures = set()  # those that a folder or a pattern happens to contain
    for path, explicit in _files(inputs, stdin, from0, folders):
        if is_url(path):
            check_allowed(path, allowed_urls)
        status = None if is_url(path) else _status(path)
        picture = not explicit and not extensions and is_image(path)
        if not explicit and not picture and not _is_video(path, status, extensions):
            notes.skipped += 1
            continue
        name = valid_text(url_name(path) if is_url(path) else path)
        key = path if status is None else (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        known = files.get(key)
        if known is None and name not in names:
            size, mtime_ns = (0, 0) if status is None else (status.st_size, status.st_mtime_ns)
            files[key] = Video(path, name, size, mtime_ns)
            names.add(name)
            if picture:
                pictures.add(key)
        elif explicit or known is None or known.path != path:
            notes.duplicates.append(name)
    if not all(is_image(video.path) for video in files.values()):
        files = {key: video for key, video in files.items() if key not in pictures}
        notes.skipped += len(pictures)
    return list(files.values()), notes


def valid_text(path: str) -> str:
    """The path as text that can be written anywhere.

    Bytes that are not valid text are shown in hexadecimal, followed by a digest, so that no two files share a name.
    """
    raw = os.fsencode(path)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return f"{raw.decode(errors='backslashreplace')}#{hashlib.sha256(raw).hexdigest()[:8]}"


def _files(
    inputs: Iterable[str], stdin: BinaryIO | None, from0: bool, folders: set[tuple[int, int]]
) -> Iterator[tuple[str, bool]]:
    """Every file, and whether an input names it explicitly."""
    for text in inputs:
        if text == "-":
            if stdin is None:
                raise InputError("the input - reads a list from standard input, and there is none")
            for path in _read_list(stdin, from0):
                yield from _below(path, folders)
        elif is_url(text):
            yield text, True
        elif os.path.lexists(text):
            yield from _below(text, folders)
        elif glob.has_magic(text):
            found = [(path, False) for path in _matching(text)]
            if not found:
                raise InputError(f"no file matches the pattern {valid_text(text)}")
            yield from found
        else:
            raise InputError(f"there is no file or folder {valid_text(text)}")


def _matching(pattern: str) -> Iterator[str]:
    """The matching files, and all files below matching folders, sorted. Wildcards match no hidden files."""
    parts = pattern.split("/")
    if "**" not in parts:
        for path in sorted(glob.iglob(pattern), key=os.fsencode):
            yield from (file for file, _ in _below(path, set()))
        return
    depth = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    root = "/".join(parts[:depth]) + "/" * bool(depth)
    for path, _ in _below(root or ".", set()):  # glob.glob never returns on a symlink loop
        below = path.removeprefix(root or "./")
        if _matches(below.split("/"), parts[depth:]):
            yield root + below


def _matches(names: list[str], parts: list[str]) -> bool:
    """Whether a path or a folder above it matches the parts of a pattern."""
    if not parts:
        return True
    if parts[0] == "**":
        return any(_matches(names[skipped:], parts[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])


def _read_list(stdin: BinaryIO, from0: bool) -> Iterator[str]:
    parts = stdin.read().split(b"\0" if from0 else b"\n")
    for part in parts:
        name = part if from0 else part.removesuffix(b"\r")
        if name:
            yield os.fsdecode(name)


def _below(path: str, folders: set[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    """The path itself if it is a file, or every file below the folder. A job enters each folder once."""
    status = None if is_url(path) else _status(path)
    if status is None or not stat.S_ISDIR(status.st_mode):
        yield path, True
        return
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        status = _status(folder)
        if status is not None and stat.S_ISDIR(status.st_mode):
            place = (status.st_dev, status.st_ino)
            if place in folders:
                continue
            folders.add(place)
            try:
                names = sorted(os.listdir(folder), key=os.fsencode, reverse=True)
            except OSError:
                yield folder, True
                continue
            waiting += [os.path.join(folder, name) for name in names if not name.startswith(".")]
        else:
            yield folder, False


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


def _is_video(path: str, status: os.stat_result | None, extensions: frozenset[str]) -> bool:
    """Decided by the suffix or, if it is unknown, by opening the file."""
    suffix = os.path.splitext(path)[1].lower()
    if status is not None and not stat.S_ISREG(status.st_mode):
        return False
    known = extensions or VIDEO_SUFFIXES
    if suffix in known or status is None or extensions or suffix in OTHER_SUFFIXES:
        return suffix in known
    try:
        probe(path)
    except VideoError:
        return False
    return True
