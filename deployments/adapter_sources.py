"""Where an adapter is kept, as a reference says it, and what a source must be able to do. Reads nothing from anywhere."""

import hashlib
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from loray.deployments.checksums import Digest
from loray.deployments.errors import AdapterFailed, InvalidRequest
from loray.deployments.request import SOURCES, AdapterRef
from loray.models.adapter_config import CONFIG_FILE
from loray.models.adapter_header import WEIGHTS_FILE

FILES = (CONFIG_FILE, WEIGHTS_FILE)  # what is fetched
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILE = "tokenizer_config.json"  # of older adapters: it may hold a template too
EXTRA_FILES = (TEMPLATE_FILE, TOKENIZER_FILE)  # fetched where they are there
PICKLE_FILE = "adapter_model.bin"
URL_SCHEMES = ("s3", "gs", "az", "https", "http")  # http only where the configuration's list says http
MAX_ID_LEN = 1024
REVISION = re.compile(r"[\w.][\w./+-]{0,254}", re.ASCII)
TOKEN = re.compile(r"[!-~]*")  # as long as a header may be


@dataclass(frozen=True, slots=True)
class Place:
    """Written in one way only: two references to one place are equal."""

    source: str  # "local", "hub" or a scheme
    address: str  # a name or folder, "org/name", a URL
    revision: str = ""  # "" = the source's newest
    origin: str = ""  # whose storage or hub it is, if not what everybody takes for the source

    @property
    def name(self) -> str:
        """What a request may call it."""
        return f"{self.address}@{self.revision}" if self.revision else self.address

    @property
    def key(self) -> str:
        """A file name of its own, which a person can read."""
        parts = (self.source, self.address, self.revision, *filter(None, (self.origin,)))
        digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()
        return f"{self.source}-{re.sub(r'[^A-Za-z0-9.]+', '-', self.name)[-64:].strip('-.')}-{digest}"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a source has at a place now."""

    files: dict[str, int]  # name -> bytes
    stamp: str  # differs when the files do; "" = the source can't tell
    is_private: bool = False  # not everybody may read it
    digests: dict[str, Digest] = field(default_factory=dict)  # by file name, of those that the source tells
    changed: tuple[str, ...] = ()  # when each file was, as far as the source tells: to the second, which is too coarse for a stamp

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


class Source(Protocol):
    """Raises AdapterNotFound and AdapterFailed. A token is "" where there is none, and never part of a message."""

    def check(self, place: Place) -> None:
        """Raises if this server may not use what comes from there, wherever it is kept by now."""

    def describe(self, place: Place, token: str) -> Offer: ...

    def fetch(self, place: Place, offer: Offer, names: Iterable[str], token: str, folder: Path) -> None:
        """Write these files of the offer, whole and with their digests, into the folder."""

    def check_unchanged(self, place: Place, offer: Offer, token: str) -> None:
        """Raises AdapterChanged if files that were fetched since the offer was made may be of different versions."""

    def may_read(self, place: Place, token: str) -> bool: ...


def missing_file(place: Place, name: str, has_pickle: bool) -> AdapterFailed:
    if name == WEIGHTS_FILE and has_pickle:
        return AdapterFailed(
            f"adapter {place.name!r}: {PICKLE_FILE} is a pickle, which can run code and is never loaded; convert it to {WEIGHTS_FILE} "
            "where you trust it: safetensors.torch.save_file(torch.load(..., weights_only=True), ...)"
        )
    return AdapterFailed(f"adapter {place.name!r}: {name} is missing")


def place_of(ref: AdapterRef, default_source: str) -> Place:
    if not ref.adapter_id or len(ref.adapter_id) > MAX_ID_LEN or not ref.adapter_id.isprintable():
        raise InvalidRequest(f"an adapter's id has 1 to {MAX_ID_LEN} printable characters", param="adapter_id")
    if not TOKEN.fullmatch(ref.api_token):
        raise InvalidRequest("the token has characters that no token has", param="api_token")
    scheme, is_url, _ = ref.adapter_id.partition("://")
    source = ref.source or (scheme if is_url else default_source)
    if source == "hub":
        return _hub_place(ref)
    if ref.revision:
        raise InvalidRequest(f"adapter {ref.adapter_id!r}: the source {source} has no revisions, only hub has", param="revision")
    if source == "local":
        return Place("local", posixpath.normpath(ref.adapter_id))
    if source not in URL_SCHEMES:
        raise InvalidRequest(f"adapter {ref.adapter_id!r}: no source {source!r}, only {', '.join(SOURCES)}", param="adapter_source")
    url = normal_url(ref.adapter_id if is_url else f"{source}://{ref.adapter_id}")
    scheme = url.partition("://")[0]
    if scheme != source and (scheme, source) != ("http", "https"):
        raise InvalidRequest(f"adapter {ref.adapter_id!r} is not of the source {source}", param="adapter_source")
    return Place(scheme, url)


class Places(NamedTuple):
    """As one server means them."""

    default_source: str
    origins: Mapping[str, str]  # source -> whose it is, where it is not what everybody takes for it

    def of(self, ref: AdapterRef) -> Place:
        """Raises InvalidRequest."""
        place = place_of(ref, self.default_source)
        return replace(place, origin=self.origins.get(place.source, ""))


def named(ref: AdapterRef, default_source: str) -> AdapterRef:
    """The reference without its token, and with its source and the name of a folder or URL written in one way. Raises InvalidRequest."""
    place = place_of(ref, default_source)
    name = ref.adapter_id if place.source == "hub" else place.address
    return AdapterRef(adapter_id=name, source=place.source, revision=ref.revision)


def normal_url(url: str) -> str:
    """Refuses what two programs could read differently, so that a comparison with the list of allowed URLs means something."""
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    if "@" in host:
        raise InvalidRequest("an adapter's URL may not hold a user name or a password", param="adapter_id")
    if scheme in ("https", "http"):
        host = host.lower()
    parts = path.strip("/").split("/") if path.strip("/") else []
    if not host or any(part in ("", ".", "..") for part in parts) or any(sign in rest for sign in "\\%?#") or not url.isprintable():
        raise InvalidRequest(
            f"adapter {url!r}: a URL is scheme://host/path, without '..', '//', '%', '?', '#' and '\\'", param="adapter_id"
        )
    return "/".join((f"{scheme}://{host}", *parts))


def _hub_place(ref: AdapterRef) -> Place:
    repo, _, revision = ref.adapter_id.partition("@")
    if revision and ref.revision and revision != ref.revision:
        raise InvalidRequest(f"adapter {ref.adapter_id!r}: the revision is also said to be {ref.revision!r}", param="revision")
    revision = revision or ref.revision
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise InvalidRequest(f"adapter {ref.adapter_id!r}: an id on the hub is org/name or org/name@revision", param="adapter_id") from None
    if revision and (not REVISION.fullmatch(revision) or ".." in revision):
        raise InvalidRequest(f"adapter {ref.adapter_id!r}: {revision!r} is not the name of a revision", param="revision")
    return Place("hub", repo, revision)
