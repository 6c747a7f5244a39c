"""Why an archive is not had at all: each with TorchServe's text, and in brackets what it answers."""

from __future__ import annotations

from penstock.errors import ArchiveError


class ArchiveNotFound(ArchiveError):
    """There is no such name, folder or file (404 ModelNotFoundException)."""

    code = "archive_not_found"


class UrlForbidden(ArchiveError):
    """No allowed URL matches, or the host is at an address that is refused (404 ModelNotFoundException)."""

    code = "url_forbidden"


class ArchiveExists(ArchiveError):
    """The store has a file of this name already (500 InternalServerException)."""

    code = "archive_exists"


class DownloadFailed(ArchiveError):
    """The URL did not give the archive; `detail` says why (400 DownloadArchiveException)."""

    code = "download_failed"


class InstallFailed(ArchiveError):
    """The model's own packages could not be installed; `detail` has what pip said (400 ModelException)."""

    code = "install_failed"
