"""Data by URL: a file of this machine, of an object store, or of a Hugging Face repository, as a local path.  [shell]

    file:///data/train.jsonl              as it is; a plain path likewise
    s3://bucket/folder/train.jsonl        through obstore (extra "s3"); gs:// and az:// too
    hf://datasets/owner/name/train.jsonl  through huggingface_hub, where the user has it; @revision may follow the name

A file that is fetched is whole or not there, and is fetched again only when the store has another version. Credentials
and endpoints come from the environment, under the names that the provider's own tools use (AWS_ENDPOINT_URL, ...).
"""

import hashlib
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ayni.errors import StorageFailed, TooLarge

DEFAULT_CACHE = Path("~/.cache/ayni/data")
MOST_BYTES = 1 << 40

_OBJECT_STORES = ("s3", "gs", "az")


def fetch(url: str, cache: Path = DEFAULT_CACHE, most_bytes: int = MOST_BYTES) -> Path:
    """Returns a local path of what a URL names.

    Args:
        url: a path or a URL, as above.
        cache: folder for what is fetched.
        most_bytes: longest file that is fetched.

    Raises:
        ValueError: there is no such kind of URL, or a part of it is missing.
        ImportError: the package that it needs is not installed; says which.
        FileNotFoundError: a local file is not there.
        TooLarge: the file is longer than `most_bytes`.
        StorageFailed: the store failed.
    """
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return _local(unquote(parts.path) if parts.scheme else url)
    if parts.scheme in _OBJECT_STORES:
        return _from_object_store(url, cache.expanduser(), most_bytes)
    if parts.scheme == "hf":
        return _from_hub(f"{parts.netloc}{parts.path}", cache.expanduser(), most_bytes)
    raise ValueError(f"{url!r} is no URL of data: it must begin with file://, s3://, gs://, az:// or hf://")


def _local(path: str) -> Path:
    found = Path(path)
    if not found.exists():
        raise FileNotFoundError(f"there is no {found} on this machine")
    return found


def _from_object_store(url: str, cache: Path, most_bytes: int) -> Path:
    try:
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise ImportError(f"{url} needs obstore: pip install 'ayni[s3]'") from None
    folder, _, name = url.rpartition("/")
    if not name or folder.count("/") < 2:
        raise ValueError(f"{url!r} names no object: give scheme://bucket/key")
    try:
        options: Any = {"allow_http": os.environ.get("AWS_ALLOW_HTTP", "") == "true", "timeout": "60s"}
        found = obstore.get(from_url(folder, client_options=options), name)
        version = f"{found.meta['e_tag']} {found.meta['size']} {found.meta['last_modified']}"
        if found.meta["size"] > most_bytes:
            sentence = f"{url} has {found.meta['size']} bytes; at most {most_bytes} are fetched"
            raise TooLarge(sentence, field="size", limit=most_bytes, received=found.meta["size"])
        target = cache / hashlib.sha256(f"{url} {version}".encode()).hexdigest()[:32] / name
        if not target.exists():
            _write(target, found, found.meta["size"], url)
    except (BaseError, FileNotFoundError) as error:
        raise StorageFailed(f"{url} can't be fetched: {error}", place=url, detail=str(error)[:300]) from error
    return target


def _write(target: Path, chunks: Any, size: int, url: str) -> None:
    """Writes a file that is there whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        try:
            for chunk in chunks:
                file.write(chunk)
            if file.tell() != size:
                sentence = f"{url} gave {file.tell()} of {size} bytes"
                raise StorageFailed(sentence, place=url, detail="cut short")
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _from_hub(path: str, cache: Path, most_bytes: int) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise ImportError(f"hf://{path} needs huggingface_hub: pip install 'ayni[train]'") from None
    download: Any = partial(hf_hub_download, **_named(path), cache_dir=cache / "hub")
    try:
        size = download(dry_run=True).file_size
        if size > most_bytes:
            sentence = f"hf://{path} has {size} bytes; at most {most_bytes} are fetched"
            raise TooLarge(sentence, field="size", limit=most_bytes, received=size)
        return Path(download())
    except HFValidationError as error:
        raise ValueError(f"hf://{path} names no file: {error}") from error
    except TooLarge:
        raise
    except Exception as error:
        # Its own errors and those of the HTTP client inside of it have no class in common.
        place, reason = f"hf://{path}", str(error)[:300]
        raise StorageFailed(f"{place} can't be fetched: {reason}", place=place, detail=reason) from error


def _named(path: str) -> dict[str, Any]:
    """Returns what hf_hub_download calls the parts of a path."""
    kind, rest = "model", path
    for prefix, name in (("datasets/", "dataset"), ("spaces/", "space")):
        if path.startswith(prefix):
            kind, rest = name, path.removeprefix(prefix)
    owner, _, rest = rest.partition("/")
    repository, _, file = rest.partition("/")
    name, _, revision = repository.partition("@")
    if not (owner and name and file):
        raise ValueError(f"hf://{path} names no file: give hf://[datasets/]owner/name[@revision]/file")
    # A revision with a slash is written with %2F, as in refs%2Fpr%2F1.
    return {"repo_id": f"{owner}/{name}", "filename": file, "repo_type": kind, "revision": unquote(revision) or None}
