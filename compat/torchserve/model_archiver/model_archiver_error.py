"""The error of an archive that cannot be written."""

from penstock.errors import ArchiveError as ModelArchiverError

__all__ = ["ModelArchiverError"]
