from __future__ import annotations

from penstock.bulk.fingerprint import differences, fingerprint, short
from penstock.bulk.types import Pixels, Sampling

MODEL = {"model": "blip", "revision": "r1", "prompt": "", "max_new_tokens": 30, "precision": "bf16"}


def test_what_changes_captions_changes_the_fingerprint_and_the_diff_names_it() -> None:
    was = fingerprint(MODEL, Sampling(), Pixels(height=4, width=4))
    changes = {
        "revision": fingerprint(MODEL | {"revision": "r2"}, Sampling(), Pixels(height=4, width=4)),
        "prompt": fingerprint(MODEL | {"prompt": "a photo"}, Sampling(), Pixels(height=4, width=4)),
        "every": fingerprint(MODEL, Sampling(every=2), Pixels(height=4, width=4)),
        "fps": fingerprint(MODEL, Sampling(fps=1.5), Pixels(height=4, width=4)),
        "kernel": fingerprint(MODEL, Sampling(), Pixels(kernel="exact", height=4, width=4)),
        "pixels": fingerprint(MODEL, Sampling(), Pixels("jpeg", height=4, width=4)),
        "width": fingerprint(MODEL, Sampling(), Pixels(height=4, width=5)),
    }
    for field, now in changes.items():
        assert [line.partition(":")[0] for line in differences(was, now)] == [field]
        assert short(now) != short(was)
    assert differences(was, changes["kernel"]) == ['kernel: was "fast", is "exact"']
    assert differences(was, changes["fps"]) == ["fps: was not set, is 1.5"]


def test_what_changes_no_caption_changes_nothing() -> None:
    one = fingerprint(MODEL, Sampling(), Pixels(height=4, width=4))
    assert fingerprint(MODEL | {"instances": 8, "max_batch_size": 64}, Sampling(), Pixels(height=4, width=4)) == one
    fast, exact = (fingerprint(MODEL, Sampling(), Pixels("source", kernel)) for kernel in ("fast", "exact"))
    assert fast == exact  # nothing is scaled on this side


def test_a_field_that_is_not_there_any_more_is_a_difference() -> None:
    assert differences({"a": 1, "old": 2}, {"a": 1}) == ["old: was 2, is not set"]
