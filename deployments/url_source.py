"""Adapters behind URLs, read through fsspec, from the places that the configuration lists and from no other. Keeps no files."""

import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import fsspec  # type: ignore[import-untyped]
from fsspec.callbacks import Callback  # type: ignore[import-untyped]

from loray.deployments.adapter_sources import EXTRA_FILES, FILES, PICKLE_FILE, URL_SCHEMES, Offer, Place, missing_file, normal_url
from loray.deployments.checksums import mismatch, told_digest
from loray.deployments.connection_pools import NUM_PARTS, widen
from loray.deployments.errors import AdapterChanged, AdapterFailed, AdapterNotFound, InvalidRequest, LorayError
from loray.models.model_folder import one_line

NUM_ATTEMPTS = 3
PAUSE_S = 0.5  # between them
ANSWER_S = 10  # for a source to say what it has, and for credentials; the libraries try again for minutes
HTTP_SCHEMES = ("https", "http")
DENIED = set(range(400, 500)) - {408, 429}  # those say: not now
QUERY = re.compile(r"\?\S+")  # of a URL that a library quotes: it may hold a token of storage_options
EXTRAS = {"s3": "s3", "gs": "gcs", "az": "az"}  # scheme -> which of loray's extras brings its library
HTTP_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)  # seconds; a download may take long, a silence not


class OffTheList(Exception):
    """A request went, or was sent on, to a place that the configuration does not list."""


class TooLong(Exception):
    """More bytes come than were announced."""


class UrlSource:
    """Whoever may use this server may read all that is listed: credentials are the server's, and a request's token goes nowhere."""

    def __init__(self, allowed_urls: list[str], storage_options: dict[str, dict[str, Any]]) -> None:
        try:
            self._allowed = [normal_url(url) for url in allowed_urls]
        except InvalidRequest as error:
            raise ValueError(f"allowed_urls: {error.message}") from None
        self._options = storage_options
        self._systems: dict[str, Future[Any]] = {}  # fsspec's file systems by scheme
        self._making = threading.Lock()
        self._makers = ThreadPoolExecutor(len(URL_SCHEMES), "url-source")

    def check(self, place: Place) -> None:
        if not self._is_allowed(place.address):
            raise AdapterFailed(f"adapter {place.name!r}: this server may not read from there; its adapters.allowed_urls says what it may")

    def describe(self, place: Place, token: str) -> Offer:
        self.check(place)
        infos: dict[str, dict[str, Any]] = {}
        for name in FILES:
            info = self._info(place, name)
            if info is None and not infos:
                raise AdapterNotFound(f"adapter {place.name!r}: there is no {name}")
            if info is None:
                raise missing_file(place, name, has_pickle=self._info(place, PICKLE_FILE) is not None)
            infos[name] = info
        for name in EXTRA_FILES:
            if info := self._info(place, name):
                infos[name] = info
        for name, info in infos.items():
            if not isinstance(info.get("size"), int):
                raise AdapterFailed(f"adapter {place.name!r}: the server does not say how large {name} is")
        digests = {name: digest for name, info in infos.items() if (digest := told_digest(place.source, info))}
        sizes, stamp = {name: info["size"] for name, info in infos.items()}, _stamp(infos)
        changed = () if stamp else tuple(info.get("Last-Modified", "") for info in infos.values())
        return Offer(sizes, stamp=stamp, digests=digests, changed=changed)

    def fetch(self, place: Place, offer: Offer, names: Iterable[str], token: str, folder: Path) -> None:
        for name in names:
            self._fetch_file(place, offer, name, folder / name)

    def check_unchanged(self, place: Place, offer: Offer, token: str) -> None:
        if self.describe(place, token) != offer:
            raise AdapterChanged(f"adapter {place.name!r} was changed while it was read")

    def may_read(self, place: Place, token: str) -> bool:
        return True

    def _is_allowed(self, url: str) -> bool:
        return any(url == allowed or url.startswith(f"{allowed}/") for allowed in self._allowed)

    def _info(self, place: Place, name: str) -> dict[str, Any] | None:
        """None: there is no such file. Servers deny in many ways what is not there, which is enough for an extra file."""
        try:
            info: dict[str, Any] = self._system(place.source).info(f"{place.address}/{name}", timeout=ANSWER_S)
        except Exception as error:  # of each storage's own library
            reason: BaseException = error
            if isinstance(error, FileNotFoundError):
                if error.__cause__ is None or place.source not in HTTP_SCHEMES:
                    return None
                reason = error.__cause__  # over HTTP fsspec says "not found" to all that goes wrong
            status = _status(reason)
            if status in (404, 410) or (name in EXTRA_FILES and (isinstance(reason, OffTheList) or status in DENIED)):
                return None
            raise _failed(place, reason) from None
        return info if info["type"] == "file" else None

    def _fetch_file(self, place: Place, offer: Offer, name: str, file: Path) -> None:
        size = offer.files[name]
        for attempt in range(1, NUM_ATTEMPTS + 1):
            try:
                self._system(place.source).get_file(f"{place.address}/{name}", str(file), callback=_Limit(size))
                if (num_bytes := file.stat().st_size) != size:
                    raise EOFError(f"{name} has {size} bytes, {num_bytes} came")
                difference = mismatch(file, offer.digests.get(name))
                if difference and self._is_digest(place, name):
                    raise EOFError(difference)
                return
            except (OffTheList, TooLong) as error:
                raise _failed(place, error) from None
            except Exception as error:  # of each storage's own library
                if attempt == NUM_ATTEMPTS:
                    raise _failed(place, error) from None
            time.sleep(PAUSE_S * attempt)

    def _is_digest(self, place: Place, name: str) -> bool:
        """Where S3 encrypts with other keys than its own, or is of directory buckets, an ETag only looks like a digest."""
        if place.source != "s3":
            return True
        system = self._system("s3")
        bucket, key, _ = system.split_path(f"{place.address}/{name}")
        head = system.call_s3("head_object", system.kwargs, Bucket=bucket, Key=key)
        is_plain = head.get("ServerSideEncryption") in (None, "AES256") and not head.get("SSECustomerAlgorithm")
        return is_plain and not bucket.endswith("--x-s3")

    def _system(self, scheme: str) -> Any:
        kind = _kind(scheme)  # its library is read from disk, which counts as nobody's silence
        with self._making:
            made = self._systems.get(scheme)
            if made is None or (made.done() and made.exception()):
                # in a thread: the search for credentials may ask servers that never answer
                made = self._systems[scheme] = self._makers.submit(self._make, scheme, kind)
        return made.result(ANSWER_S)

    def _make(self, scheme: str, kind: Any) -> Any:
        options = dict(self._options.get(scheme, {}))
        if scheme in HTTP_SCHEMES:
            client = {"timeout": HTTP_TIMEOUT, **options.get("client_kwargs", {}), "middlewares": (_guard(self._is_allowed),)}
            options["client_kwargs"] = client
            options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity"}
        if scheme == "gs":
            options.setdefault("requests_timeout", HTTP_TIMEOUT)
        if scheme == "az":
            options.setdefault("max_concurrency", NUM_PARTS)
        # not fsspec's shared instance: those of others have other credentials
        system = kind(skip_instance_cache=True, use_listings_cache=False, **options)
        widen(scheme, system)
        return system


def _kind(scheme: str) -> Any:
    if scheme == "gs":
        # not gcsfs's default: that asks for the bucket's kind over gRPC first, a minute for each file where an endpoint has none
        from gcsfs.core import GCSFileSystem

        return GCSFileSystem
    return fsspec.get_filesystem_class(scheme)


class _Limit(Callback):
    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
        if max(self.size or 0, self.value) > self._max_bytes:
            raise TooLong(f"more than the {self._max_bytes} bytes that were announced")


def _guard(is_allowed: Callable[[str], bool]) -> aiohttp.ClientMiddlewareType:
    """Sees every request before it is sent, also those that follow a redirect."""

    async def guard(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        url = request.url
        try:
            is_listed = is_allowed(normal_url(f"{url.scheme}://{url.authority}{url.path}"))
        except InvalidRequest:
            is_listed = False
        if not is_listed:
            raise OffTheList("the server sends the reader on to a place that adapters.allowed_urls does not list")
        return await send(request)

    return guard


def _stamp(infos: dict[str, dict[str, Any]]) -> str:
    tags = [str(info.get("ETag") or info.get("etag") or "") for info in infos.values()]
    return ",".join(tags) if all(tags) else ""


def _status(error: BaseException) -> int:
    """Of HTTP, 0 if it tells none."""
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden: "):  # s3fs; gcsfs
        return 403
    told = (getattr(error, name, None) for name in ("status", "code", "status_code"))  # aiohttp, gcsfs, azure
    return next((status for status in told if isinstance(status, int)), 0)


def _failed(place: Place, error: BaseException) -> LorayError:
    if isinstance(error, ImportError):
        return AdapterFailed(f"adapter {place.name!r}: the source {place.source} needs loray[{EXTRAS.get(place.source, place.source)}]")
    if isinstance(error, aiohttp.TooManyRedirects):
        return AdapterFailed(f"adapter {place.name!r}: the server sends the reader on again and again")
    if isinstance(error, aiohttp.ClientResponseError):
        return AdapterFailed(f"adapter {place.name!r}: the server answered {error.status}")
    if isinstance(error, FileNotFoundError):
        return AdapterFailed(f"adapter {place.name!r} can't be read: a file of it was there a moment ago, and is not any more")
    if isinstance(error, TimeoutError) and not str(error):
        reason = f"no answer within {ANSWER_S} s; are its endpoint in adapters.storage_options, the credentials and the network right?"
    else:
        reason = QUERY.sub("?…", one_line(error))[:300] or type(error).__name__
    return AdapterFailed(f"adapter {place.name!r} can't be read: {reason}")
