"""Model archives: reading, checking, unpacking, downloading and writing them.

Each error has TorchServe's message. Its docstring names the status and type of TorchServe's response.
"""

from penstock.errors import ArchiveError


class ArchiveNotFound(ArchiveError, code="archive_not_found"):
    """No such name, folder or file (404 ModelNotFoundException)."""


class UrlForbidden(ArchiveError, code="url_forbidden"):
    """No allowed URL matches, or the host has a refused address (404 ModelNotFoundException)."""


class ArchiveExists(ArchiveError, code="archive_exists"):
    """The store already has a file of this name (500 InternalServerException)."""


class DownloadFailed(ArchiveError, code="download_failed"):
    """The archive could not be downloaded; `detail` gives the reason (400 DownloadArchiveException)."""


class InstallFailed(ArchiveError, code="install_failed"):
    """The model's own packages could not be installed; `detail` holds pip's output (400 ModelException)."""
