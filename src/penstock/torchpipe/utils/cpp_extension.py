"""torchpipe.utils.cpp_extension, whose functions say what to do in place of compiling."""

from __future__ import annotations

from penstock.torchpipe.naming import absent

load = absent("utils.cpp_extension.load")
load_backend = absent("utils.cpp_extension.load_backend")
load_filter = absent("utils.cpp_extension.load_filter")
