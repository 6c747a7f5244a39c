"""torchpipe.utils.cpp_extension: stand-ins, because nothing is compiled."""

from penstock.torchpipe.boundary import unavailable

load = unavailable("utils.cpp_extension.load")
load_backend = unavailable("utils.cpp_extension.load_backend")
load_filter = unavailable("utils.cpp_extension.load_filter")
