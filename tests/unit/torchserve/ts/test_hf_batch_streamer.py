import threading

import pytest
import torch

from penstock.torchserve.ts.hf_batch_streamer import TextIteratorStreamerBatch


class Words:
    """A tokenizer: each number is a word."""

    def decode(self, tokens, **kwargs):
        return "".join(f"w{t} " for t in tokens)


def test_each_step_returns_the_new_text_of_every_row():
    streamer = TextIteratorStreamerBatch(Words(), 2, skip_prompt=True, timeout=10)

    def generate():
        streamer.put(torch.tensor([[1, 2], [3, 4]]))
        for step in ([5, 6], [7, 8]):
            streamer.put(torch.tensor(step))
        streamer.end()

    thread = threading.Thread(target=generate)
    thread.start()
    steps = list(streamer)
    thread.join()
    assert all(len(step) == 2 for step in steps)
    assert ["".join(step[row]["text"] for step in steps) for row in range(2)] == ["w5 w7 ", "w6 w8 "]


def test_a_wrong_number_of_rows_is_refused():
    with pytest.raises(ValueError, match=r"\(3, 1\), expected 2 rows"):
        TextIteratorStreamerBatch(Words(), 2).put(torch.ones(3, 1))
