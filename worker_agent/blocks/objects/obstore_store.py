"""Objects in S3, Google Cloud Storage or Azure, through obstore; needs the extra "s3".  [shell]

obstore waits minutes for a server that takes a connection and never answers, so timeouts and retries are always given:
a call ends within about the request timeout. A write whose answer was lost is not sent again by obstore unless the
connection was refused; callers ask instead.

Credentials come from the worker's environment, under the names that the provider's own tools use.
"""

import ipaddress
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from ayni.blocks.objects import ObjectStoreConfig
from ayni.errors import BadRequest, Fault, StorageFailed, Unsupported
from worker_agent.blocks.objects.store import Stored, storage_failed, too_large

if TYPE_CHECKING:
    from obstore import ObjectMeta, UpdateVersion
    from obstore.store import ClientConfig, RetryConfig

_DEFAULT_REGION = "us-east-1"
_NUM_RETRIES = 2
_LONGEST_CONNECT_S = 5.0
_LONGEST_DETAIL = 300

_CREDENTIALS = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_SKIP_SIGNATURE",
    ),
    "gcs": ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    "azure": ("AZURE_STORAGE_ACCOUNT_NAME",),
}
"""Variables of which one must be there where the endpoint is not the provider's own."""


class ObstoreStore:
    """A bucket."""

    def __init__(self, config: ObjectStoreConfig) -> None:
        """Prepares for calls; makes none.

        Raises:
            BadRequest: the endpoint is no URL.
            Unsupported: an option that this kind of store does not have.
            StorageFailed: the environment has no credentials for the endpoint.
        """
        self.place = f"{config.kind}://{config.bucket}" + (f" at {config.endpoint}" if config.endpoint else "")
        self._bucket = config.bucket
        _check_credentials(config)
        try:
            self._store = _STORES[config.kind](config)
        except (BaseError, ValueError) as error:
            raise BadRequest(
                f"the object store {self.place} is not possible: {_short(error)}", field="object_store"
            ) from error

    def has(self, name: str) -> int | None:
        """See ObjectStore."""
        with self._failing(f"look for {name}"):
            try:
                return obstore.head(self._store, name)["size"]
            except FileNotFoundError:
                return None

    def put_if_absent(self, name: str, data: memoryview) -> bool:
        """See ObjectStore."""
        with self._failing(f"store {name}"):
            try:
                # Bytes of its own: a request that was given up may still be reading them.
                obstore.put(self._store, name, bytes(data), mode="create")
                return True
            except (AlreadyExistsError, PreconditionError):
                return False

    def put_if_match(self, name: str, data: memoryview, version: str) -> bool:
        """See ObjectStore."""
        with self._failing(f"replace {name}"):
            try:
                obstore.put(self._store, name, bytes(data), mode=_condition(version))
                return True
            except (FileNotFoundError, PreconditionError):
                return False

    def get(self, name: str, buffer: memoryview) -> Stored | None:
        """See ObjectStore."""
        with self._failing(f"read {name}"):
            try:
                result = obstore.get(self._store, name)
            except FileNotFoundError:
                return None
            if result.meta["size"] > len(buffer):
                raise too_large(name, result.meta["size"], len(buffer))
            return Stored(data=memoryview(result.bytes()), tag=_tag(result.meta))

    def delete(self, name: str) -> None:
        """See ObjectStore."""
        with self._failing(f"delete {name}"):
            try:
                obstore.delete(self._store, name)
            except FileNotFoundError:
                return

    def close(self) -> None:
        """See ObjectStore."""

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise storage_failed(self.place, doing, f"there is no bucket {self._bucket}; create it first") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            why = f"it refuses the credentials of this worker's environment: {_short(error)}"
            raise storage_failed(self.place, doing, why) from error
        except BaseError as error:
            raise storage_failed(self.place, doing, _short(error)) from error
        except BaseException as error:
            # A panic inside obstore is no Exception; nobody else would catch it, and the agent would end.
            if type(error).__module__ != "pyo3_runtime":
                raise
            raise Fault(f"obstore failed to {doing} in {self.place}: {error}", detail=str(error)) from error


def _check_credentials(config: ObjectStoreConfig) -> None:
    """Refuses an endpoint of one's own without credentials: obstore would ask a provider's machines for some."""
    names = _CREDENTIALS[config.kind]
    if config.endpoint and not any(os.environ.get(name) for name in names):
        raise StorageFailed(
            f"there are no credentials for {config.endpoint}: set {names[0]} and what belongs to it in the worker's "
            "environment",
            place=config.endpoint,
            detail="no credentials",
        )


def _s3(config: ObjectStoreConfig) -> S3Store:
    options: dict[str, Any] = {"endpoint": _s3_endpoint(config)} if config.endpoint else {}
    return S3Store(
        config.bucket,
        disable_bulk_delete=True,
        region=config.region or _DEFAULT_REGION,
        virtual_hosted_style_request=not config.path_style,
        client_options=_client_options(config),
        retry_config=_retries(config),
        **options,
    )


def _s3_endpoint(config: ObjectStoreConfig) -> str:
    url = urlsplit(config.endpoint)
    if not config.path_style and _is_ip_address(url.hostname or ""):
        raise BadRequest(
            f"the endpoint {config.endpoint} is an IP address, which can't have a bucket's name before it; set "
            "path_style",
            field="object_store.path_style",
        )
    return config.endpoint if config.path_style else url._replace(netloc=f"{config.bucket}.{url.netloc}").geturl()


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _gcs(config: ObjectStoreConfig) -> GCSStore:
    _refuse_s3_options(config)
    options: dict[str, Any] = {"base_url": config.endpoint} if config.endpoint else {}
    return GCSStore(config.bucket, client_options=_client_options(config), retry_config=_retries(config), **options)


def _azure(config: ObjectStoreConfig) -> AzureStore:
    _refuse_s3_options(config)
    options: dict[str, Any] = {"endpoint": config.endpoint} if config.endpoint else {}
    return AzureStore(config.bucket, client_options=_client_options(config), retry_config=_retries(config), **options)


_STORES: dict[str, Callable[[ObjectStoreConfig], S3Store | GCSStore | AzureStore]] = {
    "s3": _s3,
    "gcs": _gcs,
    "azure": _azure,
}


def _refuse_s3_options(config: ObjectStoreConfig) -> None:
    for name in ("region", "path_style"):
        if getattr(config, name):
            raise Unsupported(
                f"an object store of kind {config.kind!r} has no {name}; leave it out",
                field=f"object_store.{name}",
                detail=config.kind,
            )


def _client_options(config: ObjectStoreConfig) -> "ClientConfig":
    return {
        "allow_http": urlsplit(config.endpoint).scheme == "http",
        "timeout": timedelta(seconds=config.request_timeout_s),
        "connect_timeout": timedelta(seconds=min(_LONGEST_CONNECT_S, config.request_timeout_s)),
    }


def _retries(config: ObjectStoreConfig) -> "RetryConfig":
    return {"max_retries": _NUM_RETRIES, "retry_timeout": timedelta(seconds=config.request_timeout_s)}


def _tag(meta: "ObjectMeta") -> str:
    known = {name: meta[name] for name in ("e_tag", "version") if meta[name]}
    return json.dumps(known) if known else ""


def _condition(version: str) -> "UpdateVersion":
    """Returns the condition for a version; one that nothing has where the store gave no tag."""
    return json.loads(version) if version.startswith("{") else {"e_tag": version}


def _short(error: BaseException) -> str:
    """Returns what an error says for people: without the client's structures, and of the server's page its code."""
    text = str(error).partition("\n\nDebug source")[0].partition(": <?xml")[0].strip()
    code = re.search(r"<Code>(\w+)</Code>", str(error))
    return text[:_LONGEST_DETAIL] + (f" ({code[1]})" if code else "")
