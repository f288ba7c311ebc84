import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loray.deployments import adapter_files
from loray.deployments.adapter_files import AdapterFiles, content_hash
from loray.deployments.adapter_room import AdapterRoom
from loray.deployments.errors import AdapterFailed, AdapterNotFound
from loray.models.adapter import signature
from tests.deployments.peft_folder import SHAPES, make_pipe, save_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_folder(tmp_path / "root" / "small", rank=4)
    return tmp_path / "root"


def test_an_adapter_is_found_by_its_folders_name(root: Path) -> None:
    adapter = AdapterFiles([root], SHAPES).find("small")
    assert adapter.adapter_id == "small" and adapter.num_pages == 1 and adapter.path == str(root / "small")


def test_a_folder_that_is_no_adapter_is_told_from_one_that_is_not_there(root: Path, tmp_path: Path) -> None:
    files = AdapterFiles([root], SHAPES)
    save_folder(root / "deep" / "small", rank=4)
    save_folder(tmp_path / "elsewhere", rank=4)
    save_folder(root / "linked", rank=4)
    (root / "linked" / "adapter_model.safetensors").unlink()
    os.symlink(tmp_path / "elsewhere" / "adapter_model.safetensors", root / "linked" / "adapter_model.safetensors")
    for adapter_id, reason in (
        ("nobody", r"is not in any of the folders this server reads \(.*/root\)"),
        ("../elsewhere", "is not in any of the folders"),
        (".", "is not in any of the folders"),
        ("deep", "has no adapter_config.json in its folder$"),
        ("linked", "has files that are links out of the folders this server reads"),
    ):
        with pytest.raises(AdapterNotFound, match=f"adapter '{adapter_id}' {reason}"):
            files.find(adapter_id)


def test_pages_hold_eight_ranks_each(root: Path) -> None:
    files = AdapterFiles([root], SHAPES)
    for rank, num_pages in ((1, 1), (8, 1), (9, 2), (64, 8)):
        save_folder(root / f"r{rank}", rank)
        assert files.find(f"r{rank}").num_pages == num_pages


def test_what_an_adapter_has_beside_its_pages_takes_room_in_the_pool(root: Path) -> None:
    save_folder(root / "biased", rank=4, has_bias=True)
    for page_bytes, num_pages in ((96, 1), (95, 2), (32, 3)):  # it has 24 floats
        files = AdapterFiles([root], SHAPES, AdapterRoom(3, page_bytes, host_bytes=1000))
        assert (files.find("biased").num_pages, files.find("small").num_pages) == (num_pages, 1)


@pytest.mark.parametrize(
    ("room", "reason"),
    [
        (AdapterRoom(7, page_bytes=10, host_bytes=80), "'large' needs 8 rank pages, the pool has 7: raise adapters.gpu_bytes"),
        (AdapterRoom(8, page_bytes=10, host_bytes=79), "'large' may need more than the 79 bytes of host memory"),
    ],
)
def test_what_there_could_never_be_room_for_is_refused_before_its_weights_are_read_and_not_listed(
    root: Path, monkeypatch: pytest.MonkeyPatch, room: AdapterRoom, reason: str
) -> None:
    save_folder(root / "large", rank=64)
    assert AdapterFiles([root], SHAPES, AdapterRoom(8, page_bytes=10, host_bytes=80)).find("large").num_pages == 8
    files, reads = AdapterFiles([root], SHAPES, room), []
    monkeypatch.setattr(adapter_files, "content_hash", lambda path: reads.append(path))
    with pytest.raises(AdapterFailed, match=reason):
        files.find("large")
    assert not reads and not files.fits(root / "large") and files.fits(root / "small")


def test_a_sum_of_adapters_has_the_ranks_of_both_in_each_module(root: Path) -> None:
    files = AdapterFiles([root], SHAPES, AdapterRoom(2, page_bytes=10, host_bytes=80))
    save_folder(root / "other", rank=12)
    files.check_sum("both", [root / "small", root / "other"])
    with pytest.raises(AdapterFailed, match="'both' needs 3 rank pages, the pool has 2"):
        files.check_sum("both", [root / "small", root / "other", root / "small"])


def test_a_folder_dropped_in_later_is_found_and_listed(root: Path) -> None:
    files = AdapterFiles([root], SHAPES)
    with pytest.raises(AdapterNotFound, match="late"):
        files.find("late")
    save_folder(root / "late", rank=8)
    assert files.find("late").adapter_id == "late"
    assert files.stamps(10).keys() == {"late", "small"}


def test_a_replaced_folder_is_another_version_and_an_equal_copy_is_not(root: Path) -> None:
    files = AdapterFiles([root], SHAPES)
    first = files.find("small")
    assert files.find("small").version == first.version
    save_folder(root / "copy", rank=4)
    assert files.find("copy").version == first.version
    save_folder(root / "small", rank=4, seed=1)
    assert files.find("small").version != first.version


def test_other_content_of_the_same_size_and_time_in_the_same_file_is_another_version(root: Path) -> None:
    """As `cp -p` and archives with fixed times leave it."""
    files = AdapterFiles([root], SHAPES)
    first = files.find("small")
    weights = root / "small" / "adapter_model.safetensors"
    before = weights.stat()
    save_folder(root.parent / "other", rank=4, seed=1)
    content = (root.parent / "other" / weights.name).read_bytes()
    with open(weights, "r+b") as file:
        file.write(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = weights.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert files.find("small").version != first.version


@pytest.mark.parametrize("num_times", [1, 100])
def test_files_that_are_replaced_while_they_are_read_are_read_again(root: Path, num_times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the new content would go by the old files' signature."""
    files, seeds = AdapterFiles([root], SHAPES), iter(range(1, 1 + num_times))

    def replaced(path: Path) -> str:
        if seed := next(seeds, None):
            save_folder(path, rank=4, seed=seed)
        return content_hash(path)

    monkeypatch.setattr(adapter_files, "content_hash", replaced)
    if num_times > adapter_files.NUM_TRIES:
        with pytest.raises(AdapterFailed, match="replaced again and again"):
            files.find("small")
    else:
        found = files.find("small")
        assert (found.version, found.signature) == (content_hash(root / "small"), signature(root / "small"))


def test_a_removed_folder_is_gone(root: Path) -> None:
    files = AdapterFiles([root], SHAPES)
    files.find("small")
    (root / "small" / "adapter_config.json").unlink()
    with pytest.raises(AdapterNotFound):
        files.find("small")


def test_a_broken_folder_says_what_is_wrong_until_it_is_mended(root: Path) -> None:
    files = AdapterFiles([root], SHAPES)
    (root / "small" / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(AdapterFailed, match="small"):
        files.find("small")
    save_folder(root / "small", rank=4)
    assert files.find("small").num_pages == 1


def test_what_was_refused_is_not_read_again_until_its_files_change_or_some_time_has_passed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "small" / "adapter_model.safetensors").write_bytes(b"nonsense")
    (root / "other").symlink_to("small")
    for lifetime_s, num_reads in ((10.0, 1), (1e-6, 3)):
        monkeypatch.setattr(adapter_files, "REFUSED_S", lifetime_s)
        files, reads = AdapterFiles([root], SHAPES), []
        read = files._specs.read
        monkeypatch.setattr(files._specs, "read", lambda path, read=read, reads=reads: (reads.append(path), read(path))[1])
        for name in ("small", "other", "small"):
            with pytest.raises(AdapterFailed, match=f"^adapter '{name}': adapter_model.safetensors"):
                files.find(name)
        assert len(reads) == num_reads
    save_folder(root / "small", rank=4)
    assert files.find("other").num_pages == 1


@pytest.mark.parametrize("name", [".", "", "..", "../outside", "small/..", "/etc", "nul\0byte", "x" * 5000, "link"])
def test_nothing_outside_a_root_can_be_named(root: Path, name: str) -> None:
    save_folder(root.parent / "outside", rank=4)
    (root / "link").symlink_to(root.parent / "outside")
    with pytest.raises(AdapterNotFound):
        AdapterFiles([root], SHAPES).find(name)


def test_a_file_that_links_out_of_the_root_is_not_served(root: Path) -> None:
    save_folder(root.parent / "outside", rank=4)
    weights = root / "small" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(root.parent / "outside" / weights.name)
    with pytest.raises(AdapterNotFound):
        AdapterFiles([root], SHAPES).find("small")


def test_a_link_may_lead_from_one_root_into_another(root: Path) -> None:
    other = root.parent / "other"
    save_folder(other / "linked", rank=4)
    (root / "link").symlink_to(other / "linked")
    (root / "top").symlink_to(other)
    files = AdapterFiles([root, other], SHAPES)
    assert files.find("link").path == str(other / "linked")
    with pytest.raises(AdapterNotFound):
        files.find("top")


def test_a_root_that_can_not_be_read_hides_nothing_in_the_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away, is_file = root.parent / "away", Path.is_file

    def is_file_unless_away(path: Path) -> bool:
        if path.is_relative_to(away):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))  # as a mount whose server is gone
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", is_file_unless_away)
    files = AdapterFiles([away, root], SHAPES)
    assert files.find("small").path == str(root / "small")
    with pytest.raises(AdapterNotFound):
        files.find("nobody")


def test_an_absolute_path_inside_a_root_is_fine(root: Path) -> None:
    assert AdapterFiles([root], SHAPES).find(str(root / "small")).path == str(root / "small")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(root: Path, name: str) -> None:
    (root / "small" / name).unlink()
    make_pipe(root / "small" / name)
    with pytest.raises(AdapterFailed):
        AdapterFiles([root], SHAPES).find("small")
    with pytest.raises(FileNotFoundError, match=name):
        content_hash(root / "small")


def test_a_stamp_changes_with_the_files_in_any_root(root: Path) -> None:
    other = root.parent / "other"
    files = AdapterFiles([root, root.parent / "missing", other], SHAPES)
    stamps = [files.stamps(10)]

    def changes() -> bool:
        stamps.append(files.stamps(10))
        return stamps[-1] != stamps[-2]

    assert stamps[0].keys() == {"small"} and not changes()
    save_folder(other / "small", rank=8)
    assert changes() and not changes()
    (root / "small" / "adapter_model.safetensors").unlink()
    assert changes() and not changes()
    (root / "small").rename(root / "gone")
    assert changes() and stamps[-1].keys() == {"small", "gone"}
    (other / "no adapter").mkdir()
    assert not changes() and len(files.stamps(1)) <= 2, "of each root so many"


def test_a_folder_that_can_not_be_read_for_whatever_reason_does_not_fit(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = AdapterFiles([root], SHAPES)
    monkeypatch.setattr(adapter_files.AdapterSpecs, "read", lambda specs, path: int(""))
    assert not files.fits(root / "small") and "small can't be read" in caplog.text


def test_a_folder_fits_when_its_tensors_are_the_base_models(root: Path) -> None:
    assert AdapterFiles([root], SHAPES).fits(root / "small") and not AdapterFiles([root], SHAPES).fits(root / "nobody")
    assert not AdapterFiles([root], {"model.layers.0.mlp.up_proj": (16, 24)}).fits(root / "small")


def test_many_who_ask_for_new_files_at_once_read_them_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, reads = AdapterFiles([root], SHAPES), []

    def read_slowly(path: Path) -> str:
        reads.append(path)
        while len(reads) == 1 and files._validating._locks[str(path)][1] < 4:
            time.sleep(0.001)  # until the others wait, or read too
        return content_hash(path)

    monkeypatch.setattr(adapter_files, "content_hash", read_slowly)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: files.find("small"), range(4)))
    assert len(reads) == 1 and len({adapter.version for adapter in found}) == 1
