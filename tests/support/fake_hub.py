"""Fake Hugging Face Hub: the part of its HTTP API that is needed to create a repository and commit files."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

TOKEN = "hf_TokenOfTheTests"


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]
    oid: str


@dataclass
class FakeHub:
    """State of the fake Hub, and its injected faults.

    :param repos: name -> whether the repository is private
    :param objects: large files by SHA-256
    :param refusals: part of a path -> HTTP status codes for the next requests with it, in order
    :param licenses: valid values for the license of a model card
    :param silent: while set, requests are not answered
    :param silent_paths: parts of the paths that are not answered
    """

    endpoint: str = ""
    repos: dict[str, bool] = field(default_factory=dict)
    writable: bool = True
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    refusals: dict[str, list[int]] = field(default_factory=dict)
    licenses: tuple[str, ...] = ("apache-2.0", "mit")
    silent: threading.Event = field(default_factory=threading.Event)
    silent_paths: tuple[str, ...] = ()
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the repository after all commits."""
        return {name: content for commit in self.commits for name, content in commit.files.items()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        return self.server.hub

    def log_message(self, *_args) -> None:
        pass

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.hub.silent.is_set() or any(part in self.path for part in self.hub.silent_paths):
            self.hub.ended.wait(60)
            self.close_connection = True
            return
        status, answer = self.answer(body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = handle_any

    def answer(self, body: bytes) -> tuple[int, dict]:
        for part, statuses in self.hub.refusals.items():
            if part in self.path and statuses:
                return statuses.pop(0), {"error": "told to refuse"}
        if self.path.startswith("/storage/"):  # signed URLs need no token
            if hashlib.sha256(body).hexdigest() != self.path.rsplit("/", 1)[-1]:
                return 400, {}
            self.hub.objects[self.path.rsplit("/", 1)[-1]] = body
            return 200, {}
        if self.path == "/api/validate-yaml":
            return self.validate(json.loads(body)["content"])
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if self.path == "/api/repos/create":
            return self.create(json.loads(body))
        if self.path.endswith("/auth-check/write"):
            return (200, {}) if self.hub.writable else (403, {"error": "Forbidden"})
        if "/preupload/" in self.path:
            return 200, {"files": [self.upload_mode(file["path"]) for file in json.loads(body)["files"]]}
        if self.path.endswith("/info/lfs/objects/batch"):
            return 200, {"objects": [self.lfs_object(entry) for entry in json.loads(body)["objects"]]}
        if "/commit/" in self.path:
            return self.commit([json.loads(line) for line in body.splitlines()])
        if "/tag/" in self.path:
            self.hub.tags[json.loads(body)["tag"]] = self.path.rsplit("/", 1)[-1]
            return 200, {}
        if self.command == "GET" and self.path.startswith("/api/models/"):
            return 200, {"id": "me/model", "sha": self.hub.commits[-1].oid if self.hub.commits else "0" * 40}
        return 404, {"error": "unknown"}

    def validate(self, content: str) -> tuple[int, dict]:
        metadata = yaml.safe_load(content.split("---")[1])
        if metadata.get("license") in (None, *self.hub.licenses):
            return 200, {"errors": [], "warnings": []}
        return 400, {"errors": [{"message": '"license" must be one of those'}], "warnings": []}

    def create(self, wanted: dict) -> tuple[int, dict]:
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repos:
            return 409, {"url": f"{self.hub.endpoint}/{name}"}
        if not self.hub.writable:
            return 403, {"error": "Forbidden"}
        self.hub.repos[name] = wanted.get("visibility") == "private"
        return 200, {"url": f"{self.hub.endpoint}/{name}"}

    def upload_mode(self, path: str) -> dict:
        is_large = path.endswith((".safetensors", ".pt", ".model"))
        return {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}

    def lfs_object(self, entry: dict) -> dict:
        if entry["oid"] in self.hub.objects:
            return entry
        return {**entry, "actions": {"upload": {"href": f"{self.hub.endpoint}/storage/{entry['oid']}"}}}

    def commit(self, lines: list[dict]) -> tuple[int, dict]:
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        oid = f"{len(self.hub.commits) + 1:040x}"
        self.hub.commits.append(Commit(lines[0]["value"]["summary"], files, oid))
        return 200, {"commitUrl": f"{self.hub.endpoint}/me/model/commit/{oid}", "commitOid": oid}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: FakeHub

    def handle_error(self, *_args) -> None:
        """Print nothing: tests kill clients in the middle of a request."""


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    server = _Server(("127.0.0.1", 0), _Handler)
    hub = server.hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
