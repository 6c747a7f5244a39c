"""torchpipe.utils.test: clients in threads, and what they measured."""

from __future__ import annotations

from penstock.torchpipe.absent import absent
from penstock.torchpipe.utils.measuring import of_files, of_function

test_function = of_function
test_from_raw_file = of_files

Sampler = absent("utils.test.Sampler")
test = absent("utils.test.test")
throughput = absent("utils.test.throughput")
