"""The application as Serve gets it."""

from pathlib import Path

import pytest
from ray import serve

from loray.deployments.app import build
from loray.deployments.config import ServerArgs
from tests.models.tiny_llama import save_llama
from tests.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny_tokenizer(tmp_path / "model")
    return save_llama(tmp_path / "model", vocab_size=len(tiny_tokenizer()))


def test_no_call_waits_in_serves_own_queue_for_those_that_loray_holds(model: Path) -> None:
    """There a health check would wait too, and nobody would look at deadlines."""
    args = {"model": {"id": str(model)}, "device": "cpu", "scheduler": {"max_running": 2, "max_waiting": 2}}
    ingress = build(ServerArgs.model_validate(args))
    for application in (ingress, ingress._bound_deployment.init_args[0]):
        assert isinstance(application, serve.Application)
        assert application._bound_deployment.max_ongoing_requests > 10 * ServerArgs().limits.max_concurrent_requests
