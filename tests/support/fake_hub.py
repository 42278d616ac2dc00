"""Fake Hugging Face Hub: the part of its HTTP API that is needed to create a repository and commit files."""

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

TOKEN = "hf_TokenOfTheTests"
LICENSES = (None, "apache-2.0", "mit")


class FakeHub(ThreadingHTTPServer):
    """The fake Hub, and its injected faults."""

    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, bool] = {}  # name -> whether the repository is private
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}  # large files by SHA-256
        self.commits: list[str] = []  # messages
        self.tags: dict[str, str] = {}
        self.requests: list[str] = []
        self.writable = True
        self.refusals: dict[str, list[int]] = {}  # part of a path -> status codes for the next requests with it
        self.silent_paths: tuple[str, ...] = ()  # parts of the paths that are not answered
        self.ended = threading.Event()

    def handle_error(self, *_args) -> None:
        """Print nothing: tests kill clients in the middle of a request."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args) -> None:
        pass

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} {self.path}")
        if any(part in self.path for part in self.server.silent_paths):
            self.server.ended.wait(300)
            self.close_connection = True
            return
        status, answer = self.answer(self.server, body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = handle_any

    def answer(self, hub: FakeHub, body: bytes) -> tuple[int, dict]:
        for part, statuses in hub.refusals.items():
            if part in self.path and statuses:
                return statuses.pop(0), {"error": "told to refuse"}
        name = self.path.rsplit("/", 1)[-1]
        if self.path.startswith("/storage/"):  # signed URLs need no token
            hub.objects[name] = body
            return 200, {}
        lines = [json.loads(line) for line in body.splitlines()]
        if self.path == "/api/validate-yaml":
            if yaml.safe_load(lines[0]["content"].split("---")[1]).get("license") in LICENSES:
                return 200, {"errors": [], "warnings": []}
            return 400, {"errors": [{"message": '"license" must be one of those'}], "warnings": []}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if self.path == "/api/repos/create":
            repo = f"{lines[0]['organization']}/{lines[0]['name']}"
            status = 409 if repo in hub.repos else 200
            hub.repos.setdefault(repo, lines[0].get("visibility") == "private")
            return status, {"url": f"{hub.endpoint}/{repo}"}
        if self.path.endswith("/auth-check/write"):
            return (200, {}) if hub.writable else (403, {"error": "Forbidden"})
        if "/preupload/" in self.path:
            paths = [file["path"] for file in lines[0]["files"]]
            modes = ["lfs" if path.endswith((".safetensors", ".pt")) else "regular" for path in paths]
            files = zip(paths, modes, strict=True)
            return 200, {"files": [{"path": path, "uploadMode": m, "shouldIgnore": False} for path, m in files]}
        if self.path.endswith("/info/lfs/objects/batch"):
            storage = f"{hub.endpoint}/storage"
            objects = [{**o, "actions": {"upload": {"href": f"{storage}/{o['oid']}"}}} for o in lines[0]["objects"]]
            return 200, {"objects": objects}
        if "/commit/" in self.path:
            for line in lines[1:]:
                value = line["value"]
                content = base64.b64decode(value["content"]) if line["key"] == "file" else hub.objects[value["oid"]]
                hub.files[value["path"]] = content
            hub.commits.append(lines[0]["value"]["summary"])
            oid = str(len(hub.commits)) * 40
            return 200, {"commitUrl": f"{hub.endpoint}/me/model/commit/{oid}", "commitOid": oid}
        if "/tag/" in self.path:
            hub.tags[lines[0]["tag"]] = name
            return 200, {}
        return 404, {"error": "unknown"}


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield hub
        finally:
            hub.ended.set()
            hub.shutdown()
