"""Model archives: reading, checking, unpacking, downloading and writing them.

Each error has TorchServe's message. Its docstring names the status and type of TorchServe's response.
"""

from penstock.errors import ArchiveError


class ArchiveNotFound(ArchiveError):
    """No such name, folder or file (404 ModelNotFoundException)."""

    code = "archive_not_found"


class UrlForbidden(ArchiveError):
    """No allowed URL matches, or the host has a refused address (404 ModelNotFoundException)."""

    code = "url_forbidden"


class ArchiveExists(ArchiveError):
    """The store already has a file of this name (500 InternalServerException)."""

    code = "archive_exists"


class DownloadFailed(ArchiveError):
    """The archive could not be downloaded; `detail` gives the reason (400 DownloadArchiveException)."""

    code = "download_failed"


class InstallFailed(ArchiveError):
    """The model's own packages could not be installed; `detail` holds pip's output (400 ModelException)."""

    code = "install_failed"
