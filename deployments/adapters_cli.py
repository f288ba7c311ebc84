"""`loray adapters …`: the life cycle of a running server's adapters, over its HTTP API. Knows nothing but that API."""

import argparse
import ipaddress
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

DEFAULT_URL = "http://127.0.0.1:8000"
LOAD_S = 660.0  # a server gives a load up after 600
MIN_ID_WIDTH = 12
ACTIONS = {
    "list": "every adapter the server knows",
    "load": "bring an adapter into host memory",
    "unload": "free all memory and disk an adapter takes, after its last running request",
    "pin": "keep an adapter in memory whoever else needs the room",
    "unpin": "let it go again when room is needed",
    "reload": "look at its source again; running requests keep their version",
}


class AdminError(Exception):
    """One line for people."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "adapters",
        help="list, load, unload, pin, unpin or reload the adapters of a running server",
        description="The adapters of a running server that has an admin key (api_keys.admin in its config).",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, description in ACTIONS.items():
        one = actions.add_parser(action, help=description, description=f"{action}: {description}.")
        if action == "list":
            one.add_argument("--state", help="only those in this state: known, loading, host, gpu, failed or unloading")
        else:
            one.add_argument("adapter_id", metavar="ID")
        if action == "load":
            one.add_argument("--source", help="where it lies: local, hub, s3, …; as the ID's scheme or the server's default says")
            one.add_argument("--revision", help="branch, tag or commit, where the source has them")
            one.add_argument("--pin", action="store_true", help=ACTIONS["pin"])
            one.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token for an adapter not everybody may read")
        one.add_argument("--url", default=DEFAULT_URL, help="of the server; default: %(default)s")
        key = one.add_mutually_exclusive_group()
        key.add_argument("--key", help="the admin key; other users of this machine may see it")
        key.add_argument("--key-file", type=Path, metavar="FILE", help="holds the admin key")
        one.add_argument("--json", action="store_true", help="the server's answer as it is")


def run(options: argparse.Namespace) -> int:
    lines = _lines(_ask(options), options)
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # who reads has enough, as `head`; nothing is left to be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _lines(answer: Any, options: argparse.Namespace) -> list[str]:
    if options.json:
        return [json.dumps(answer, indent=2)]
    if not answer["adapters"]:
        return [_nothing(options)]
    return table(answer["adapters"], shutil.get_terminal_size((120, 24)).columns, time.time())


def _nothing(options: argparse.Namespace) -> str:
    """What an answer without any adapter says."""
    if options.action == "list":
        return f"no adapter is in the state {options.state}" if options.state else "no adapters are known"
    return f"{options.adapter_id} is unloaded"


def _ask(options: argparse.Namespace) -> Any:
    try:
        with _opener(options.url).open(_request(options), timeout=LOAD_S) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        raise AdminError(_reason(error)) from error
    except (OSError, HTTPException, ValueError) as error:  # ValueError: an address that can't be one
        raise AdminError(f"no answer from {options.url}: {getattr(error, 'reason', error)}") from error
    try:
        answer = json.loads(text)
        answer["adapters"]
    except (ValueError, KeyError, TypeError) as error:
        raise AdminError(f"{options.url} is no loray server, by its answer") from error
    return answer


def _opener(url: str) -> urllib.request.OpenerDirector:
    """A server on this machine is asked directly, whatever http_proxy says: no proxy is to see its key."""
    host = urlsplit(url).hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        is_here = host == "localhost"
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))


def _request(options: argparse.Namespace) -> urllib.request.Request:
    if not options.url.startswith(("http://", "https://")):
        raise AdminError(f"--url: {options.url} is no address of a server: http://… or https://…")
    url, method, body = f"{options.url.rstrip('/')}/admin/adapters", "GET", None
    if options.action == "list":
        url += f"?state={quote(options.state)}" if options.state else ""
    elif options.action == "load":
        method, body = "POST", _load_body(options)
    else:
        url += f"/{quote(options.adapter_id, safe='')}"
        method = "DELETE" if options.action == "unload" else "POST"
        url += "" if options.action == "unload" else f"/{options.action}"
    headers = {"Content-Type": "application/json"} if body else {}
    key = _read(options.key_file) if options.key_file else options.key
    if key:
        if not (key.isascii() and key.isprintable()):
            raise AdminError("the admin key has characters that no header may have: it is printable ASCII")
        headers["Authorization"] = f"Bearer {key}"
    return urllib.request.Request(url, data=body, headers=headers, method=method)


def _load_body(options: argparse.Namespace) -> bytes:
    fields = {"adapter_id": options.adapter_id, "source": options.source, "revision": options.revision, "pin": options.pin}
    if options.token_file:
        fields["api_token"] = _read(options.token_file)
    return json.dumps(fields).encode()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AdminError(f"{path} can't be read: {getattr(error, 'strerror', 'it is no text')}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        message = json.load(error)["error"]
    except (ValueError, KeyError, TypeError):
        message = error.reason
    return f"{' '.join(str(message).split())} ({error.code})"


# --- the table

HEADERS = ("ADAPTER", "STATE", "VERSION", "RANK", "GPU", "HOST", "DISK", "RUNNING", "SERVED", "FAILED", "LAST USED")
LEFT_ALIGNED = 3  # columns of words; those of numbers stand on the right


def table(adapters: Sequence[dict[str, Any]], width: int, now: float) -> list[str]:
    """Lines no longer than the terminal, at the cost of the ids' middles. Under an adapter that failed, why."""
    rows = [_cells(adapter, now) for adapter in adapters]
    widths = [max(len(row[column]) for row in (HEADERS, *rows)) for column in range(len(HEADERS))]
    widths[0] = min(widths[0], max(MIN_ID_WIDTH, width - sum(widths[1:]) - 2 * (len(widths) - 1)))
    lines = [_line(HEADERS, widths)]
    for adapter, row in zip(adapters, rows, strict=True):
        lines.append(_line((_shortened(row[0], widths[0]), *row[1:]), widths))
        lines += [f"  {reason}" for reason in dict.fromkeys((adapter["error"], adapter.get("last_failure"))) if reason]
    return lines


def _cells(adapter: dict[str, Any], now: float) -> tuple[str, ...]:
    kinds = [kind for kind in ("pinned", "private", "merge") if adapter[f"is_{kind}"]]
    state = ", ".join((adapter["state"], *kinds))
    sizes = [_size(adapter[f"{tier}_bytes"]) for tier in ("gpu", "host", "disk")]
    counts = [str(adapter[f"num_{what}"]) for what in ("running", "served", "failed")]
    return (adapter["adapter_id"], state, adapter["version"][:8] or "-", str(adapter["rank"] or "-"), *sizes, *counts, _ago(adapter, now))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.ljust(width) if column < LEFT_ALIGNED else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def _shortened(text: str, width: int) -> str:
    kept = (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - 1 - kept]}…{text[-kept:]}"


def _size(num_bytes: int) -> str:
    if not num_bytes:
        return "-"
    size, units = float(num_bytes), ["B", "K", "M", "G", "T"]
    while size >= 999.5 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f}{units[0]}" if size >= 9.95 or units[0] == "B" else f"{size:.1f}{units[0]}"


def _ago(adapter: dict[str, Any], now: float) -> str:
    if not adapter["last_used"]:
        return "never"
    seconds = max(0, int(now - adapter["last_used"]))
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {name} ago"
    return f"{seconds} s ago"
