"""Keeps the libraries' pools of connections from being full, where with ten or a hundred slow downloads a question waits until it fails.

Knows neither places nor files.
"""

from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import aiohttp
from fsspec.asyn import sync  # type: ignore[import-untyped]
from huggingface_hub import get_session, set_client_factory

ALL_PORTS = 2**16  # more connections to one address there can't be; botocore has no word for "any number"
NUM_PARTS = 10  # of one file at once, as with s3fs; adlfs would take an eighth of the file descriptors, which only its pool kept small


def widen(scheme: str, system: Any) -> None:
    """The pool of a file system of fsspec's that has asked nothing yet. A limit that the configuration sets for S3 stays."""
    if scheme == "s3":
        system.config_kwargs = {"max_pool_connections": ALL_PORTS, **system.config_kwargs}
        return
    with suppress(AttributeError):  # in a library's later version: its small pool is better than none
        session = sync(system.loop, _session, scheme, system)
        session.connector._limit = 0  # any number. A connector of ours would lack the certificate that gcsfs may give its own


async def _session(scheme: str, system: Any) -> aiohttp.ClientSession:
    """On fsspec's loop, where it is used."""
    if scheme == "az":
        transport = system.service_client._config.transport
        await transport.open()
        return transport.session
    return await (system._set_session() if scheme == "gs" else system.set_session())


@cache
def widen_hub() -> None:
    """The pool of huggingface_hub's client, which is one for the whole process, and of those that it makes after a fork or a failure."""
    with suppress(AttributeError):  # the same
        usual: Any = get_session()
        client, http = type(usual), import_module(type(usual).__module__)  # of httpx or httpx2, by huggingface_hub's version
        limits = http.Limits(max_connections=None, max_keepalive_connections=20)  # 20: what both keep by themselves
        kept = {name: getattr(usual, name) for name in ("event_hooks", "follow_redirects", "timeout")}
        set_client_factory(lambda: client(limits=limits, **kept))
