"""What the runtimes share."""

from __future__ import annotations

from typing import Final

from penstock.errors import LoadFailed, describe

PRECISIONS: Final = ("fp32", "fp16", "bf16")
OPTIMIZATIONS: Final = ("none", "optimize_for_inference", "compile")


def not_installed(what: str, extra: str, error: ImportError) -> LoadFailed:
    """That a package cannot be imported, and which extra brings it."""
    return LoadFailed(f"{what} cannot be imported ({describe(error)}): pip install 'penstock[{extra}]'")
