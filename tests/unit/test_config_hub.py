"""A pinned snapshot comes from a (stub) hub once, from the cache afterwards, and every failure is named."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from physarum.configs.errors import HubAccessError, HubError, HubNotFoundError, HubOfflineError, HubUnreachableError
from physarum.configs.model import HubConfig
from physarum.configs.model_source import fetch_hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b'{"model_type": "tiny"}', "model.safetensors": b"w" * 100_000, "model.onnx": b"unwanted"}


class StubHub(BaseHTTPRequestHandler):
    """The endpoints that a snapshot download needs, for the repository org/tiny with the tag v1."""

    requests: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Tests read `requests` instead."""

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.requests.append(f"{self.command} {path}")
        if "/org/gated" in path:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        if "/org/broken" in path:
            return self._send(418, b"{}", {}, body)
        if not path.startswith(("/api/models/org/tiny", "/org/tiny/")):
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if path == "/api/models/org/tiny/revision/v1":
            return self._send(200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode(), {}, body)
        if path == f"/api/models/org/tiny/tree/{COMMIT}":
            return self._send(200, json.dumps(_tree()).encode(), {}, body)
        prefix = f"/org/tiny/resolve/{COMMIT}/"
        if path.startswith(prefix) and (content := FILES.get(path.removeprefix(prefix))) is not None:
            return self._send(200, content, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT}, body)
        return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _tree() -> list[dict[str, object]]:
    return [{"type": "file", "path": name, "size": len(data), "oid": _oid(data)} for name, data in FILES.items()]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A running stub hub; the requests it was sent."""
    received: list[str] = []
    handler = type("Handler", (StubHub,), {"requests": received})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield received
    server.shutdown()
    server.server_close()
    thread.join(timeout=5)


def hub(folder: Path, **changes: object) -> HubConfig:
    return HubConfig.model_validate({"id": "org/tiny", "revision": "v1", "cache_dir": folder, **changes})


@pytest.mark.parametrize("revision", ["v1", COMMIT])
def test_a_pinned_snapshot_is_fetched_once_and_then_found(tmp_path: Path, requests: list[str], revision: str) -> None:
    reports: list[tuple[int, int]] = []
    folder = fetch_hub(hub(tmp_path, revision=revision), lambda present, total: reports.append((present, total)))
    wanted = {name: content for name, content in FILES.items() if name != "model.onnx"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted
    assert folder.name == COMMIT
    size = sum(map(len, wanted.values()))
    assert reports[-1] == (size, size)
    assert [present for present, _ in reports] == sorted(present for present, _ in reports)

    requests.clear()
    assert fetch_hub(hub(tmp_path, revision=revision), None) == folder
    assert fetch_hub(hub(tmp_path, revision=revision, offline=True), None) == folder
    assert requests == []


def test_offline_with_a_cold_cache_says_so_without_a_connection(
    tmp_path: Path, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        HubOfflineError, match=r"org/tiny@v1: found offline mode and no whole snapshot in .*Remedy: fetch"
    ):
        fetch_hub(hub(tmp_path, offline=True), None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubOfflineError):
        fetch_hub(hub(tmp_path), None)
    assert requests == []


def test_a_snapshot_with_a_missing_file_is_not_whole(tmp_path: Path, requests: list[str]) -> None:
    folder = fetch_hub(hub(tmp_path), None)
    (folder / "config.json").unlink()
    with pytest.raises(HubOfflineError):
        fetch_hub(hub(tmp_path, offline=True), None)
    assert fetch_hub(hub(tmp_path), None) == folder
    assert (folder / "config.json").read_bytes() == FILES["config.json"]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"id": "org/none"}, HubNotFoundError, "found no such repository"),
        ({"revision": "v9"}, HubNotFoundError, "found no such revision"),
        ({"id": "org/gated"}, HubAccessError, r"access refused \(HTTP 403\)"),
        ({"id": "org/broken"}, HubError, "found"),
    ],
)
def test_each_refusal_of_the_hub_is_named(
    tmp_path: Path, requests: list[str], changes: dict[str, object], error: type[HubError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        fetch_hub(hub(tmp_path, **changes), None)
    assert "Remedy: " in str(caught.value)


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(HubUnreachableError, match=r"org/tiny@v1 at http://127.0.0.1:9: found no answer"):
        fetch_hub(hub(tmp_path), None)
