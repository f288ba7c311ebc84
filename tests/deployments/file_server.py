"""A real HTTP server over a folder whose answers a test can spoil, and one that speaks as the Hugging Face hub does."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from loray.deployments import adapter_store


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "FileServer"

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.path))
        rule = self.server.rules.get(self.path)
        if rule is None or not rule(self):
            self.server.answer(self)

    do_HEAD = do_GET

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def cut_short(self, body: bytes) -> None:
        """Announces all and sends half."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.close_connection = True

    def log_message(self, *args: Any) -> None:
        pass


class Hold:
    """A rule: a download stops when it has come (`held` is set) until it is let go (`released` is)."""

    def __init__(self) -> None:
        self.held, self.released = threading.Event(), threading.Event()

    def __call__(self, handler: Handler) -> bool:
        if handler.command == "GET":
            self.held.set()
            self.released.wait(60)
        return False


class CutOnce:
    """A rule: the first download breaks off in the middle."""

    def __init__(self, body: bytes) -> None:
        self.has_cut = False
        self._body = body

    def __call__(self, handler: Handler) -> bool:
        if handler.command != "GET" or self.has_cut:
            return False
        self.has_cut = True
        handler.cut_short(self._body)
        return True


class Spoil:
    """A rule: so many downloads bring as many bytes as they should, and other ones."""

    def __init__(self, body: bytes, num_times: int) -> None:
        self._body = body[:-1] + bytes([body[-1] ^ 1])
        self._num_left = num_times

    def __call__(self, handler: Handler) -> bool:
        if handler.command != "GET" or not self._num_left:
            return False
        self._num_left -= 1
        handler.reply(200, self._body, ETag='"spoilt"')
        return True


class FileServer(ThreadingHTTPServer):
    """Serves what is in `root`. A rule answers itself and returns True, or lets the server go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.rules: dict[str, Callable[[Handler], bool]] = {}  # by path
        self.requests: list[tuple[str, str]] = []  # method, path
        self.tells_digests = False
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answer(self, handler: Handler) -> None:
        file = self.root / handler.path.lstrip("/")
        if file.is_file():
            body = file.read_bytes()
            digest = {"Content_MD5": base64.b64encode(hashlib.md5(body).digest()).decode()} if self.tells_digests else {}
            handler.reply(200, body, ETag=f'"{hashlib.md5(body).hexdigest()}"', **digest)
        else:
            handler.reply(404)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""

    def num_gets(self, ending: str) -> int:
        return sum(method == "GET" and path.endswith(ending) for method, path in self.requests)

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class HubServer(FileServer):
    """root/org/name is a repository with one commit: its content."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.readers: dict[str, set[str]] = {}  # private repository -> tokens
        self.gated: set[str] = set()  # of those: everybody may see them, readers may read them

    def stand_in(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        """For the hub itself, whatever this machine knows of it. home: for the client's own files."""
        monkeypatch.setenv("HF_ENDPOINT", self.url)
        monkeypatch.setenv("HF_HOME", str(home))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(adapter_store, "get_token", lambda: None)  # the developer's own

    def answer(self, handler: Handler) -> None:
        path, _, _ = handler.path.partition("?")
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo, rest = ("/".join(parts[2:4]), parts[4:]) if is_api else ("/".join(parts[:2]), parts[2:])
        folder = self.root / repo
        may_read = self._token(handler) in self.readers.get(repo, {self._token(handler)})
        if not folder.is_dir() or (not may_read and repo not in self.gated):
            return handler.reply(401, X_Error_Code="RepoNotFound")
        if rest[1:2] and rest[1] not in ("main", self.commit(repo)):
            return handler.reply(404, X_Error_Code="RevisionNotFound")
        if is_api:
            return handler.reply(200, json.dumps(self._info(repo)).encode(), Content_Type="application/json")
        if not may_read:
            return handler.reply(403, X_Error_Code="GatedRepo")
        file = folder / rest[2]
        if not file.is_file():
            return handler.reply(404, X_Error_Code="EntryNotFound")
        body = file.read_bytes()
        return handler.reply(200, body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', X_Repo_Commit=self.commit(repo))

    def commit(self, repo: str) -> str:
        digest = hashlib.sha1(b"".join(file.read_bytes() for file in sorted((self.root / repo).iterdir())))
        return digest.hexdigest()

    def _info(self, repo: str) -> dict[str, Any]:
        files = [self._sibling(file) for file in (self.root / repo).iterdir()]
        is_gated = repo in self.gated
        is_private = repo in self.readers and not is_gated
        return {"id": repo, "sha": self.commit(repo), "private": is_private, "gated": "auto" if is_gated else False, "siblings": files}

    def _sibling(self, file: Path) -> dict[str, Any]:
        about = {"rfilename": file.name, "size": file.stat().st_size}
        if file.suffix != ".safetensors":
            return about
        return {**about, "lfs": {"size": about["size"], "sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "pointerSize": 134}}

    def _token(self, handler: Handler) -> str:
        return handler.headers.get("Authorization", "").removeprefix("Bearer ")
