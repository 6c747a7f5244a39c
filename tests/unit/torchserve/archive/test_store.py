import gc
import os
import re
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ArchiveError, ConfigError
from penstock.torchserve.archive import ArchiveExists, ArchiveNotFound, UrlForbidden
from penstock.torchserve.archive.manifest import MANIFEST
from penstock.torchserve.archive.safe_unpack import UnpackLimits
from penstock.torchserve.archive.store import ModelStore, read_folder
from support.archives import read_archive


@pytest.mark.parametrize("kind", ["mar", "tgz"])
def test_an_archive_is_unpacked_and_read(archives: Any, tmp_path: Path, kind: str):
    found = read_archive(getattr(archives, kind)(), tmp_path / "target")
    assert found.folder == tmp_path / "target"
    assert found.has_manifest
    assert (found.manifest.model_name, found.manifest.handler) == ("m", "h.py")
    assert (found.folder / "h.py").is_file()


def test_every_file_but_a_mar_is_read_as_a_tar(archives: Any, tmp_path: Path):
    assert read_archive(archives.tgz(name="model.data"), tmp_path / "t").manifest.model_name == "m"


def test_a_folder_is_read_in_place(archives: Any, tmp_path: Path):
    tree = archives.tree()
    assert read_archive(tree, tmp_path / "target").folder == tree
    assert not (tmp_path / "target").exists()


def test_the_only_folder_in_a_folder_is_the_archive(archives: Any):
    outer = archives.tree({f"inner/{name}": data for name, data in archives.files().items()}, "outer")
    assert read_folder(outer).folder == outer / "inner"


def test_a_folder_with_only_a_manifest_is_the_archive(archives: Any):
    tree = archives.tree({MANIFEST: archives.manifest(handler="image_classifier")})
    assert read_folder(tree).folder == tree


def test_without_a_manifest_the_model_is_named_after_the_file(archives: Any, tmp_path: Path):
    found = read_archive(archives.mar({"h.py": b"", "w.pt": b""}, "resnet-18.mar"), tmp_path / "t")
    assert not found.has_manifest
    assert (found.manifest.model_name, found.manifest.model_version) == ("resnet-18", "1.0")
    assert (found.manifest.handler, found.manifest.runtime, found.manifest.raw) == ("", "python", {})
    assert read_folder(tmp_path / "t", name="given").manifest.model_name == "given"


@pytest.mark.parametrize("kind", ["mar", "tgz"])
@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (b"{", "is not JSON"),
        (b" " * 2**21, "more than"),
        (b'{"model": {"modelName": "m", "handler": "../../x"}}', "handler: .*climb"),
        (b'{"model": {"modelName": "../x", "handler": "h.py"}}', "the model's name is '../x'"),
    ],
)
def test_an_archive_with_a_bad_manifest_leaves_nothing(
    archives: Any, tmp_path: Path, kind: str, manifest: bytes, said: str
):
    inner = "" if kind == "mar" else "m/"
    path = getattr(archives, kind)({f"{inner}h.py": b"", f"{inner}{MANIFEST}": manifest})
    with pytest.raises(ArchiveError, match=said):
        read_archive(path, tmp_path / "in" / "target")
    assert list((tmp_path / "in").iterdir()) == []


def test_a_manifest_that_is_a_folder_is_reported(archives: Any):
    tree = archives.tree({f"{MANIFEST}/x": b"", "h.py": b""})
    with pytest.raises(ArchiveError, match="cannot be read: Is a directory"):
        read_folder(tree)


ANY = "file://.*|http(s)?://.*"
STRICT = r"https://example\.com/.*"


@pytest.fixture
def store(archives: Any, tmp_path: Path) -> ModelStore:
    """A store with m.mar, t.tar.gz and the folder d; all URLs are allowed."""
    archives.mar()
    archives.tgz(name="t.tar.gz")
    archives.tree(name="d")
    return ModelStore(archives.folder, allowed_urls=[ANY], cache=tmp_path / "cache" / "models")


def strict(store: ModelStore, *allowed: str) -> ModelStore:
    return ModelStore(store.root, allowed_urls=[STRICT, *allowed], cache=store.cache)


def cached(store: ModelStore) -> list[str]:
    return sorted(p.name for p in store.cache.iterdir())


def test_the_names_are_archives_and_folders(store: ModelStore):
    assert store.root is not None
    (store.root / ".hidden.mar").write_bytes(b"")
    (store.root / "readme.txt").write_text("")
    assert store.names() == ["d", "m.mar"]
    assert ModelStore(None, cache=store.cache).names() == []


def test_an_archive_is_unpacked_once_and_removed_after_its_last_use(store: ModelStore):
    first, second = store.open("m.mar"), store.open("m.mar")
    assert first.digest == second.digest
    assert first.archive.folder == second.archive.folder == store.cache / first.digest
    first.close()
    first.close()
    assert (second.archive.folder / "h.py").is_file()
    second.close()
    assert cached(store) == []


def test_a_tar_is_opened_like_a_mar(store: ModelStore):
    with closing(store.open("t.tar.gz")) as opened:
        assert opened.archive.manifest.model_name == "m"


def test_a_folder_is_used_in_place(store: ModelStore, tmp_path: Path):
    assert store.root is not None
    with closing(store.open("d")) as opened:
        assert (opened.archive.folder, opened.digest) == (store.root / "d", "")
        assert cached(store) == []
    assert (store.root / "d" / "h.py").is_file()


def test_a_changed_archive_is_unpacked_separately(store: ModelStore, archives: Any):
    with closing(store.open("m.mar")) as old:
        archives.mar(archives.files(modelVersion="2.0"))
        with closing(store.open("m.mar")) as new:
            assert (old.archive.manifest.model_version, new.archive.manifest.model_version) == ("1.0", "2.0")
            assert old.archive.folder != new.archive.folder


def test_a_given_name_applies_only_to_archives_without_a_manifest(store: ModelStore, archives: Any):
    archives.mar({"h.py": b""}, "bare.mar")
    with (
        closing(store.open("bare.mar")) as a,
        closing(store.open("bare.mar", name="given")) as b,
        closing(store.open("m.mar", name="x")) as c,
    ):
        names = [opened.archive.manifest.model_name for opened in (a, b, c)]
    assert names == ["bare", "given", "m"]


def test_a_refused_archive_leaves_nothing_in_the_cache(store: ModelStore, archives: Any):
    archives.mar({"../x": b""}, "bad.mar")
    archives.mar({"MAR-INF/MANIFEST.json": b"{"}, "worse.mar")
    for name in ("bad.mar", "worse.mar"):
        with pytest.raises(ArchiveError):
            store.open(name)
        assert cached(store) == []


def test_the_stores_limits_apply_to_its_archives(store: ModelStore):
    with pytest.raises(ArchiveError, match="at most 5"):
        ModelStore(store.root, cache=store.cache, limits=UnpackLimits(total_bytes=5)).open("m.mar")


def test_leftovers_of_a_killed_process_are_replaced(store: ModelStore):
    with closing(store.open("m.mar")) as opened:
        digest = opened.digest
    half = store.cache / f".{digest}.abc"
    half.mkdir()
    (half / "h.py").write_text("half")
    with closing(store.open("m.mar")) as opened:
        assert cached(store) == [digest, f"{digest}.lock"]
        assert (opened.archive.folder / "h.py").read_text() != "half"


def test_many_threads_share_one_folder(store: ModelStore):
    """Each sees the files whole for as long as it holds them, however opening and closing meet."""
    failures: list[BaseException] = []

    def user() -> None:
        try:
            for _ in range(20):
                with closing(store.open("m.mar")) as opened:
                    assert (opened.archive.folder / "h.py").read_text().startswith("def handle")
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=user) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cached(store) == []


def test_repeated_opening_leaks_no_file_descriptor(store: ModelStore, archives: Any):
    archives.mar({"../x": b""}, "bad.mar")
    store.open("m.mar").close()
    gc.collect()  # closes what other tests left
    before = len(os.listdir("/dev/fd"))
    for _ in range(50):
        store.open("m.mar").close()
        with pytest.raises(ArchiveError):
            store.open("bad.mar")
    assert len(os.listdir("/dev/fd")) - before < 10  # of 100 openings


OTHER_PROCESS = """
import sys
from contextlib import closing
from pathlib import Path
from penstock.torchserve.archive.store import ModelStore
with closing(ModelStore(Path(sys.argv[1]), cache=Path(sys.argv[2])).open("m.mar")) as opened:
    print(opened.archive.folder, flush=True)
    sys.stdin.read()
"""


def other_process(store: ModelStore) -> subprocess.Popen[str]:
    """Opens m.mar, prints its folder, and closes it at the end of its input."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(store.root), str(store.cache)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_share_one_folder(store: ModelStore):
    with other_process(store) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        with closing(store.open("m.mar")) as mine:
            assert mine.archive.folder == folder
        assert (folder / "h.py").is_file()
        other.communicate("")
    assert cached(store) == []


def test_files_used_by_a_killed_process_can_be_removed(store: ModelStore):
    with other_process(store) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        other.kill()
        other.wait()
    assert folder.is_dir()
    store.open("m.mar").close()
    assert cached(store) == []


LOCAL_MISSES = {
    "unknown": ("nono.mar", "Model not found at: nono.mar"),
    "empty": ("", "empty url"),
    "climbing": ("../x.mar", "Relative path is not allowed in url: ../x.mar"),
    "climbing later": ("a/../../x.mar", "Relative path is not allowed in url: a/../../x.mar"),
    "climbing url": ("file:///a/../etc/passwd", "Relative path is not allowed in url: file:///a/../etc/passwd"),
    "the store itself": (".", "Model not found at: ."),
    "root": ("/", "Model not found at: /"),
    "NUL": ("m\0.mar", "Model not found at: m\0.mar"),
    "long": ("m" * 5000, "Model not found at: mmm"),
    "no such file": ("file:///nono/nono.mar", "Model not found at: file:///nono/nono.mar"),
    "other host": ("file://host/x.mar", "Model not found at: file://host/x.mar"),
    "broken url": ("http://[x.mar", "Model not found at: http://[x.mar"),
    "url without a name": ("https://example.com/", "Model not found at: https://example.com/"),
    "url with a bad name": ("https://example.com/a%2fb%5cc", "Model not found at: https://example.com/a%2fb%5cc"),
    "ftp": ("ftp://example.com/x.mar", "Model not found at: ftp://example.com/x.mar"),
}


@pytest.mark.parametrize(("url", "said"), LOCAL_MISSES.values(), ids=LOCAL_MISSES)
def test_a_missing_archive_is_reported_with_torchserves_message(store: ModelStore, url: str, said: str):
    with pytest.raises(ArchiveNotFound, match=re.escape(said)):
        store.open(url)


def test_without_a_configured_store_no_archive_is_found(store: ModelStore):
    with pytest.raises(ArchiveNotFound, match=r"Model store has not been configured\."):
        ModelStore(None, cache=store.cache).open("m.mar")


def test_a_path_to_a_file_means_the_file_of_that_name_in_the_store(store: ModelStore, tmp_path: Path):
    (tmp_path / "m.mar").write_bytes(b"another")
    assert store.root is not None
    assert store.locate(str(tmp_path / "m.mar")) == store.root / "m.mar"


def test_an_absolute_folder_needs_an_allowed_url(store: ModelStore, archives: Any, tmp_path: Path):
    outside = tmp_path / "outside"
    archives.tree(name="../outside")
    assert store.locate(str(outside)) == outside
    with pytest.raises(UrlForbidden, match=re.escape(f"Given URL {outside} does not match any allowed URL(s)")):
        strict(store).open(str(outside))
    assert strict(store, f"file://{tmp_path}/.*").locate(str(outside)) == outside
    assert strict(store, f"{tmp_path}/outside").locate(str(outside)) == outside
    assert store.root is not None
    assert strict(store).locate(str(store.root / "d")) == store.root / "d"


def test_a_link_out_of_the_store_needs_an_allowed_url(store: ModelStore, archives: Any, tmp_path: Path):
    assert store.root is not None
    outside = archives.mar(name="../elsewhere.mar").resolve()
    (store.root / "link.mar").symlink_to(outside)
    (store.root / "linked").symlink_to(archives.tree(name="../tree"))
    (store.root / "inner.mar").symlink_to("m.mar")
    assert store.locate("link.mar") == outside
    for name in ("link.mar", "linked"):
        with pytest.raises(UrlForbidden):
            strict(store).locate(name)
    assert strict(store).locate("inner.mar") == store.root / "m.mar"


def test_the_store_may_itself_be_a_link(store: ModelStore, tmp_path: Path):
    assert store.root is not None
    (tmp_path / "link").symlink_to(store.root)
    linked = ModelStore(tmp_path / "link", allowed_urls=[STRICT], cache=store.cache)
    assert linked.locate("m.mar") == store.root / "m.mar"


def test_a_file_url_is_used_in_place(store: ModelStore, archives: Any, tmp_path: Path):
    outside = archives.mar(name="../my model.mar").resolve()
    url = f"file://{outside}".replace(" ", "%20")
    assert store.locate(url) == outside
    assert store.names() == ["d", "m.mar"]
    with pytest.raises(UrlForbidden):
        strict(store).locate(url)


def test_a_url_whose_file_name_is_taken_is_refused_first(store: ModelStore):
    for url in ("http://127.0.0.1:1/x/m.mar", "https://nowhere.invalid/m.mar?x=1", "file:///nono/m.mar"):
        with pytest.raises(ArchiveExists, match=r"Model file already exists m\.mar"):
            store.open(url)


@pytest.mark.parametrize(
    "url", ["http://example.com/x.mar", "https://example.org/x.mar", "https://example.com.evil.org/x.mar", "file:///x"]
)
def test_the_whole_url_must_match(store: ModelStore, url: str):
    with pytest.raises(UrlForbidden, match=re.escape(f"Given URL {url} does not match any allowed URL(s)")):
        strict(store).open(url)


def test_an_invalid_pattern_in_allowed_urls_is_reported(store: ModelStore):
    with pytest.raises(ConfigError, match=r"allowed_urls: '\*' is not a regular expression"):
        ModelStore(store.root, allowed_urls=["*"], cache=store.cache)


def test_a_cache_that_other_users_can_write_is_refused(store: ModelStore, tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ArchiveError, match="other users can write"):
        ModelStore(store.root, cache=shared)
    with pytest.raises(ArchiveError, match="other users can write"):
        ModelStore(store.root, cache=shared / "inner")
    shared.chmod(0o1777)  # as /tmp is
    ModelStore(store.root, cache=shared / "inner")
    (tmp_path / "link").symlink_to(shared)
    with pytest.raises(ArchiveError, match="other users can write"):
        ModelStore(store.root, cache=tmp_path / "link")


def test_the_cache_is_private(store: ModelStore):
    assert not os.stat(store.cache).st_mode & 0o077


def test_only_downloads_are_forgotten(store: ModelStore):
    store.forget("m.mar")
    store.forget("file:///somewhere/m.mar")
    assert "m.mar" in store.names()
