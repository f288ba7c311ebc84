"""Whose storage stands behind a source's name, as this server is set up: by one id two servers may mean different files. Asks nobody.

No credentials are looked at, for who renews them means the same files, and no `https://`, whose URLs name their hosts.
"""

import os
from collections.abc import Mapping
from typing import Any

from fsspec.config import conf  # type: ignore[import-untyped]

HUB = "https://huggingface.co"

# By scheme: what fsspec calls it too, and the settings that say where, each as an option of the storage's library and in its environment.
STORAGES: dict[str, tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "s3": (("s3", "s3a"), (("endpoint_url", ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),)),
    "gs": (("gs", "gcs"), (("endpoint_url", ("STORAGE_EMULATOR_HOST",)),)),
    "az": (
        ("az", "abfs", "abfss"),
        (
            ("account_name", ("AZURE_STORAGE_ACCOUNT_NAME",)),
            ("account_host", ()),
            ("connection_string", ("AZURE_STORAGE_CONNECTION_STRING",)),
        ),
    ),
}
PLACES_IN_A_CONNECTION_STRING = ("accountname", "blobendpoint", "endpointsuffix")


def source_origins(storage_options: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """By source, those alone that are not what everybody takes for it."""
    hub = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    origins = {"hub": "" if hub == HUB else hub}
    for scheme, (protocols, settings) in STORAGES.items():
        options: dict[str, Any] = {}
        for told in (*(conf.get(protocol, {}) for protocol in protocols), storage_options.get(scheme, {})):
            options |= told
        options = {**(options.get("client_kwargs") or {}), **options}
        origins[scheme] = " ".join(filter(None, (_setting(options, *setting) for setting in settings)))
    return {source: origin for source, origin in origins.items() if origin}


def _setting(options: Mapping[str, Any], option: str, variables: tuple[str, ...]) -> str:
    values = (options.get(option), *(os.environ.get(variable) for variable in variables))
    value = str(next(filter(None, values), "")).rstrip("/")
    if option != "connection_string":
        return value
    fields = (field.strip() for field in value.split(";"))
    return ";".join(sorted(field for field in fields if field.partition("=")[0].lower() in PLACES_IN_A_CONNECTION_STRING))
