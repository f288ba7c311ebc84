"""Whose account an adapter's tokens are charged to: one for each adapter, however a request names it. Reads nothing but links."""

import os
from collections.abc import Iterable
from contextlib import suppress

from loray.deployments.adapter_sources import URL_SCHEMES, place_of
from loray.deployments.config import AdapterArgs
from loray.deployments.errors import InvalidRequest
from loray.deployments.request import AdapterRef


def account_of(ref: AdapterRef, path: str) -> str:
    """The same for all revisions. ref: with its source; path: the adapter's folder, which tells apart what lies in the roots."""
    return path if ref.source == "local" else place_of(ref, ref.source).address


def account_of_merge(parts: Iterable[str]) -> str:
    """parts: the accounts of what is merged, in whatever order."""
    return "\n".join(sorted(set(parts)))


def account_weights(args: AdapterArgs) -> dict[str, float]:
    """By account. By name too: a link below a root may be made, or lead elsewhere, later on."""
    weights = dict(args.weights)
    for name, weight in args.weights.items():
        if name:
            for source in ("", *URL_SCHEMES):  # an id of the default source, or of one that requests name
                with suppress(InvalidRequest):
                    weights.setdefault(place_of(AdapterRef(adapter_id=name, source=source), args.default_source).address, weight)
            for root in args.local_roots:
                with suppress(OSError, ValueError):  # a name that no file system can hold
                    weights.setdefault(os.path.realpath(root / name), weight)
    return weights
