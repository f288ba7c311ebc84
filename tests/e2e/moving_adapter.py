"""An adapter whose files change while it is asked for, in each of the ways in which a server gets to know of it. Asks for no tokens."""

import os
import shutil
import uuid
from pathlib import Path
from typing import NamedTuple

import httpx

from loray.models.adapter import WEIGHTS_FILE
from tests.e2e.conftest import App
from tests.e2e.file_server import FileServer
from tests.e2e.patience import PATIENCE_S


class Moving(NamedTuple):
    adapter_id: str
    folder: Path
    is_reloaded: bool  # by an admin, after each change; else whoever asks next finds it

    def change(self, app: App, version: Path, key: dict[str, str]) -> None:
        """The version's weights in the place of what is there, at one stroke; then the server knows."""
        staged = self.folder / f".{WEIGHTS_FILE}"
        shutil.copy(version / WEIGHTS_FILE, staged)
        os.replace(staged, self.folder / WEIGHTS_FILE)
        if self.is_reloaded:
            answer = httpx.post(f"{app.url}/admin/adapters/{self.adapter_id}/reload", headers=key, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text


def moving(how: str, root: Path, files: FileServer) -> Moving:
    """Its folder is not there yet, and no server knows it."""
    name = f"moving-{uuid.uuid4().hex[:8]}"
    return {
        "a folder": Moving(name, root / name, is_reloaded=False),
        "a folder, reloaded": Moving(name, root / name, is_reloaded=True),
        "a download, reloaded": Moving(f"{files.url}/{name}", files.folder / name, is_reloaded=True),
    }[how]
