"""Opens the object store that a configuration names.  [shell]"""

from pathlib import Path
from urllib.parse import urlsplit

from ayni.blocks.objects import ObjectStoreConfig
from ayni.errors import BadRequest, Unsupported
from worker_agent.blocks.folders import folder_under
from worker_agent.blocks.objects.file_store import FileStore
from worker_agent.blocks.objects.keys import check_prefix
from worker_agent.blocks.objects.probe import check_conditions
from worker_agent.blocks.objects.store import ObjectStore

SERVICES = ("s3", "gcs", "azure")


def open_store(config: ObjectStoreConfig, root: Path) -> ObjectStore:
    """Opens a store and makes sure that it can be used: writes, reads, replaces and removes one small object.

    Blocks for up to a few request timeouts, so it belongs off the event loop.

    Args:
        config: which store.
        root: folder that stores of kind "file" can't leave.

    Raises:
        BadRequest: the configuration breaks a rule.
        Unsupported: the store ignores conditions, or what it needs is not installed.
        StorageFailed: the store can't be reached or refuses this worker.
    """
    _check(config)
    store, place = _open_folder(config, root) if config.kind == "file" else _open_service(config)
    try:
        check_conditions(store, place, config.prefix)
    except BaseException:
        store.close()
        raise
    return store


def _check(config: ObjectStoreConfig) -> None:
    check_prefix(config.prefix)
    problems = [
        *([] if config.kind in ("file", *SERVICES) else [f"the kind {config.kind!r} is none of file, s3, gcs, azure"]),
        *([] if config.bucket else ["the bucket has no name"]),
        *_problems_of_endpoint(config.endpoint),
        *([] if config.max_requests >= 1 else [f"max_requests is {config.max_requests}; it must be at least 1"]),
        *([] if 0 < config.request_timeout_s < 1e6 else ["request_timeout_s must be more than 0"]),
    ]
    if problems:
        raise BadRequest(f"the object store is not possible: {'; '.join(problems)}", field="object_store")


def _problems_of_endpoint(endpoint: str) -> list[str]:
    try:
        url = urlsplit(endpoint)
        is_sound = not endpoint or (url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0)
    except ValueError:
        is_sound = False
    return [] if is_sound else [f"the endpoint {endpoint!r} is no URL such as https://host:port"]


def _open_folder(config: ObjectStoreConfig, root: Path) -> tuple[ObjectStore, str]:
    for name in ("endpoint", "region", "path_style"):
        if getattr(config, name):
            raise Unsupported(
                f"an object store of kind 'file' has no {name}; leave it out",
                field=f"object_store.{name}",
                detail="file",
            )
    folder = folder_under(root, config.bucket, "object_store.bucket")
    # Names with links out of the root would be written through them.
    folder_under(root, f"{config.bucket}/{config.prefix.rpartition('/')[0]}", "object_store.prefix")
    return FileStore(folder, timeout_s=config.request_timeout_s), str(folder)


def _open_service(config: ObjectStoreConfig) -> tuple[ObjectStore, str]:
    try:
        from worker_agent.blocks.objects.obstore_store import ObstoreStore
    except ImportError as error:
        raise Unsupported(
            f"object stores of kind {config.kind!r} need obstore: install the extra ayni[s3]",
            field="object_store.kind",
            detail=str(error),
        ) from error
    store = ObstoreStore(config)
    return store, store.place
