from __future__ import annotations

from penstock.bulk.run import Totals
from penstock.bulk.types import Video


def test_totals_take_those_that_nobody_looked_at_for_the_mean_of_the_others() -> None:
    videos = [Video(name, name, 0, 0) for name in "abcd"]
    totals = Totals(4)
    assert totals.frames() is None
    totals.set(videos[0], 100, known=False)
    assert totals.frames() == 400
    totals.set(videos[1], 50, known=False)
    assert totals.frames() == 300
    totals.set(videos[0], 90, known=True)
    totals.set(videos[0], 100, known=False)  # a prober that comes late
    for video in videos[1:]:
        totals.set(video, 10, known=True)
    assert totals.frames() == 120
