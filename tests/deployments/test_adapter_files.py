from pathlib import Path

import pytest

from loray.deployments import adapter_files
from loray.deployments.adapter_files import AdapterFiles
from loray.deployments.errors import AdapterFailed, AdapterNotFound
from loray.models.adapter import AdapterSpec
from tests.deployments.peft_folder import SHAPES, save_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_folder(tmp_path / "root" / "small", rank=4)
    return tmp_path / "root"


def test_an_adapter_is_found_by_its_folders_name(root: Path) -> None:
    adapter = AdapterFiles([root], SHAPES).find("small")
    assert adapter.adapter_id == "small" and adapter.num_pages == 1 and adapter.path == str(root / "small")


def test_pages_hold_eight_ranks_each(root: Path) -> None:
    files = AdapterFiles([root], SHAPES)
    for rank, num_pages in ((1, 1), (8, 1), (9, 2), (64, 8)):
        save_folder(root / f"r{rank}", rank)
        assert files.find(f"r{rank}").num_pages == num_pages


def test_a_folder_dropped_in_later_is_found_and_listed(root: Path) -> None:
    files = AdapterFiles([root], SHAPES)
    with pytest.raises(AdapterNotFound, match="late"):
        files.find("late")
    save_folder(root / "late", rank=8)
    assert files.find("late").adapter_id == "late"
    assert files.names() == ["late", "small"]


def test_a_replaced_folder_is_another_version_and_an_equal_copy_is_not(root: Path) -> None:
    files = AdapterFiles([root], SHAPES)
    first = files.find("small")
    assert files.find("small").version == first.version
    save_folder(root / "copy", rank=4)
    assert files.find("copy").version == first.version
    save_folder(root / "small", rank=4, seed=1)
    assert files.find("small").version != first.version


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


def test_an_absolute_path_inside_a_root_is_fine(root: Path) -> None:
    assert AdapterFiles([root], SHAPES).find(str(root / "small")).path == str(root / "small")


def test_of_many_new_folders_some_are_read_at_a_time_and_none_twice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "NUM_NEW", 2)
    paths = [root / name for name in ("small", "b", "c")]
    for path in paths[1:]:
        save_folder(path, rank=4)
    files = AdapterFiles([root], {"model.layers.0.mlp.up_proj": (16, 24)})
    reads: list[Path] = []
    read = files._specs.read

    def noted(folder: Path) -> AdapterSpec:
        reads.append(folder)
        return read(folder)

    monkeypatch.setattr(files._specs, "read", noted)
    assert [files.fitting(paths) for _ in range(3)] == [{paths[2]}, set(), set()] and reads == paths
    save_folder(paths[0], rank=8)
    assert files.fitting(paths) == set() and reads == [*paths, paths[0]], "its files are others now"
