"""Adapters on the Hugging Face hub, or on a server that speaks as it does (HF_ENDPOINT). Keeps nothing, neither files nor tokens."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from loray.deployments.adapter_sources import EXTRA_FILES, FILES, PICKLE_FILE, Offer, Place, missing_file
from loray.deployments.checksums import digest_of, mismatch
from loray.deployments.connection_pools import widen_hub
from loray.deployments.errors import AdapterFailed, AdapterNotFound, LorayError, SourceFailed
from loray.models.adapter_config import CONFIG_FILE

TIMEOUT_S = 10.0  # for the hub to say something
NUM_ATTEMPTS = 2  # at a file that came with another digest; what breaks off is gone on with by the hub's own client


class HubSource:
    def __init__(self) -> None:
        widen_hub()
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="loray")

    def check(self, place: Place) -> None:
        """Any repository will do."""

    def describe(self, place: Place, token: str) -> Offer:
        with _translated(place):
            info = self._api.model_info(
                place.address, revision=place.revision or None, files_metadata=True, token=token or False, timeout=TIMEOUT_S
            )
        sizes = {file.rfilename: file.size for file in info.siblings or []}
        hashes = {file.rfilename: file.lfs.sha256 for file in info.siblings or [] if file.lfs}
        for name in FILES:
            if sizes.get(name) is None:
                raise missing_file(place, name, has_pickle=PICKLE_FILE in sizes)
        if info.gated and not self.may_read(place, token):  # all may see what a gated repository has, few may read it
            raise not_found(place)
        if info.id != place.address and info.id.casefold() == place.address.casefold():  # else one adapter would be several here
            raise AdapterFailed(f"adapter {place.name!r}: on the hub its id is written {info.id!r}; ask for it so")
        is_private = bool(info.private or info.gated)
        if not is_private and token and not self.may_read(place, ""):
            if not self.may_read(place, token):  # it is gone
                raise not_found(place)
            is_private = True
        files = {name: sizes[name] for name in (*FILES, *EXTRA_FILES) if sizes.get(name) is not None}
        digests = {name: digest for name in files if (digest := digest_of("sha256", hashes.get(name, "")))}
        return Offer(files, stamp=info.sha or "", is_private=is_private, digests=digests)

    def fetch(self, place: Place, offer: Offer, names: Iterable[str], token: str, folder: Path) -> None:
        revision = offer.stamp or place.revision or None
        for name in names:
            for attempt in range(NUM_ATTEMPTS):
                with _translated(place):
                    self._api.hf_hub_download(
                        place.address, name, revision=revision, local_dir=folder, token=token or False, force_download=attempt > 0
                    )
                difference = mismatch(folder / name, offer.digests.get(name))
                if not difference:
                    break
            else:
                raise AdapterFailed(f"adapter {place.name!r}: {difference}")

    def check_unchanged(self, place: Place, offer: Offer, token: str) -> None:
        """They are all of one commit."""

    def may_read(self, place: Place, token: str) -> bool:
        url = hf_hub_url(place.address, CONFIG_FILE, revision=place.revision or None, endpoint=self._api.endpoint)
        try:
            with _translated(place):
                self._api.get_hf_file_metadata(url=url, token=token or False, timeout=TIMEOUT_S)
        except AdapterNotFound:
            return False
        return True


def not_found(place: Place) -> LorayError:
    """The same words for what is not there and for what this token may not read: nobody learns which."""
    return AdapterNotFound(f"adapter {place.name!r} is not on the hub, or not for this token")


@contextmanager
def _translated(place: Place) -> Iterator[None]:
    try:
        yield
    except RevisionNotFoundError:
        raise AdapterNotFound(f"adapter {place.name!r}: the hub has no such revision of it") from None
    except RepositoryNotFoundError:  # gated ones too
        raise not_found(place) from None
    except LocalEntryNotFoundError as error:  # nor on the hub, whose answer is the cause
        raise _failure(place, error.__cause__ or error) from None
    except EntryNotFoundError:
        raise AdapterFailed(f"adapter {place.name!r}: a file is missing on the hub") from None
    except Exception as error:
        raise _failure(place, error) from None


def _failure(place: Place, error: BaseException) -> LorayError:
    if not isinstance(error, HfHubHTTPError):  # of its HTTP library, whatever that is; the text may quote what was sent
        return SourceFailed(f"adapter {place.name!r}: the hub can't be reached ({type(error).__name__})")
    if error.response.status_code in (401, 403):
        return not_found(place)
    kind = SourceFailed if error.response.status_code >= 500 else AdapterFailed
    return kind(f"adapter {place.name!r}: the hub answered {error.response.status_code}")
