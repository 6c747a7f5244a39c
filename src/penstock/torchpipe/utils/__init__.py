"""torchpipe.utils: `test` measures a function; what compiles is not there."""

from __future__ import annotations

from penstock.torchpipe.utils import cpp_extension as cpp_extension
from penstock.torchpipe.utils import test as test
