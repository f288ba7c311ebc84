"""One thread: tiny models gain nothing from more, and other tests run beside these."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel

from loray.models import converted
from tests.models import forkserver
from tests.models.tiny_llama import save_adapter, save_llama


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True, scope="session")
def no_model_cards() -> Iterator[None]:
    """PEFT writes one beside every adapter, which takes it longer than the adapter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeftModel, "create_or_update_model_card", lambda model, folder: None)
        yield


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="session")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By rank; each on all linears, except rank 12, which leaves most of them out."""
    folder = tmp_path_factory.mktemp("adapters")
    targets = {12: ["q_proj", "down_proj"]}
    return {rank: save_adapter(base, folder / f"r{rank}", rank, targets.get(rank), r=rank, lora_alpha=rank) for rank in (1, 4, 8, 12, 64)}


@pytest.fixture
def quick_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion is still a process of its own, but one that need not import transformers anew."""
    monkeypatch.setattr(converted, "subprocess", SimpleNamespace(run=forkserver.run))
