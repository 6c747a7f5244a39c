"""The runtimes that a manifest can name."""

from enum import Enum


class RuntimeType(Enum):
    PYTHON = "python"
    PYTHON3 = "python3"
    LSP = "LSP"
