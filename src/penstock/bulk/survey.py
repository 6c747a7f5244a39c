"""What a job would have to do, found without sending a frame."""

from __future__ import annotations

from penstock.bulk.job import Job, check_libraries
from penstock.bulk.options import JPEG_SHARE, Options, plan
from penstock.bulk.parts import Parts
from penstock.bulk.progress import duration, teller
from penstock.bulk.sampling import estimate
from penstock.bulk.video import Probe, VideoError

LINK_BYTES_PER_S = 118e6  # of payload on a link of 1 Gbit/s


def dry_run(options: Options, parts: Parts | None = None) -> list[str]:
    """Lines for people: each file, then the sums. Raises what Job.run does before it captions."""
    job = Job(options, teller("plain"), parts)
    videos = job.videos()
    servers = job.servers()
    how = plan(options, servers, len(videos))
    check_libraries(how)
    lines, frames, wire_bytes, broken = [], 0, 0, 0
    for video in videos:
        try:
            found = job.parts.probe(video.path)
        except VideoError as e:
            broken += 1
            lines.append(f"{video.name}: {e.message}")
            continue
        count = estimate(options.sampling, found.frames, found.duration_s)
        frames += count
        wire_bytes += count * frame_wire_bytes(options, how.frame_bytes, found)
        lines.append(
            f"{video.name}: about {count:,} of {found.frames:,} frames, {found.width}x{found.height} {found.codec}, "
            f"{duration(found.duration_s)}, {video.bytes:,} bytes"
        )
    first = servers[0]
    size = "their own size" if how.pixels.height is None else f"{how.pixels.width}x{how.pixels.height}"
    lines += [
        f"{len(videos):,} videos, {broken:,} of them cannot be opened, {sum(v.bytes for v in videos):,} bytes on disk",
        f"about {frames:,} frames to caption, as {how.pixels.mode} of {size}, {how.chunk_size} a request",
        f"about {wire_bytes:,} bytes on the wire: {duration(wire_bytes / LINK_BYTES_PER_S)} at 1 Gbit/s",
        f"model {first.model_id or first.model}, revision {first.revision}, "
        f"{sum(s.instances for s in servers)} instances on {len(servers)} servers",
    ]
    return lines


def frame_wire_bytes(options: Options, scaled_bytes: int, found: Probe) -> int:
    """About what one frame takes."""
    raw = scaled_bytes or found.width * found.height * 3
    return raw // JPEG_SHARE if options.pixels == "jpeg" else raw
