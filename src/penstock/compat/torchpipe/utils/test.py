"""torchpipe.utils.test: clients in threads, and what they measured."""

from __future__ import annotations

from penstock.compat.torchpipe.utils.measuring import of_files, of_function

test_function = of_function
test_from_raw_file = of_files
