import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest

from loray.deployments.checksums import mismatch, told_digest

BODY = b"weights"
MD5, SHA256 = hashlib.md5(BODY), hashlib.sha256(BODY)
MD5_64, SHA256_64 = (base64.b64encode(digest.digest()).decode() for digest in (MD5, SHA256))


@pytest.mark.parametrize(
    ("scheme", "info"),
    [
        ("s3", {"ETag": f'"{MD5.hexdigest()}"'}),
        ("s3", {"ETag": f'"{MD5.hexdigest().upper()}"'}),
        ("gs", {"md5Hash": MD5_64, "etag": "CJ=="}),
        ("az", {"content_settings": {"content_md5": bytearray(MD5.digest())}}),
        ("az", {"content_settings": {"content_md5": MD5_64}}),
        ("https", {"Content-MD5": MD5_64}),
        ("http", {"Digest": f"crc32c=AAAA, MD5={MD5_64}"}),
    ],
)
def test_an_md5_is_understood_as_each_storage_tells_it(scheme: str, info: dict[str, Any]) -> None:
    assert told_digest(scheme, info) == ("md5", MD5.hexdigest())


def test_of_two_digests_the_stronger_counts() -> None:
    assert told_digest("https", {"Content-MD5": MD5_64, "Digest": f"SHA-256={SHA256_64},md5={MD5_64}"}) == ("sha256", SHA256.hexdigest())


@pytest.mark.parametrize(
    ("scheme", "info"),
    [
        ("s3", {"ETag": f'"{MD5.hexdigest()}-2"'}),  # of an upload in parts
        ("s3", {}),
        ("https", {"ETag": f'"{MD5.hexdigest()}"'}),  # whatever the server takes for it
        ("gs", {"etag": MD5.hexdigest()}),  # of a composite object
        ("az", {"content_settings": {"content_md5": None}}),
        ("az", {"content_settings": None}),
        ("https", {"Content-MD5": "no base64!"}),
        ("https", {"Content-MD5": SHA256_64}),
        ("https", {"Digest": "unixsum=30637"}),
    ],
)
def test_what_is_no_digest_of_the_file_is_not_taken_for_one(scheme: str, info: dict[str, Any]) -> None:
    assert told_digest(scheme, info) is None


def test_a_file_with_other_bytes_is_told_by_its_name_and_digests(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(BODY)
    for digest in (None, ("md5", MD5.hexdigest()), ("sha256", SHA256.hexdigest())):
        assert mismatch(file, digest) == ""
    file.write_bytes(b"weighty")
    assert mismatch(file, None) == ""
    message = mismatch(file, ("md5", MD5.hexdigest()))
    assert file.name in message and MD5.hexdigest() in message and hashlib.md5(b"weighty").hexdigest() in message
