"""Fake servers of ngrok."""

import asyncio
import contextlib
import datetime
import json
import ssl
import struct
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

# ngrok's protocol: a frame has 3 bytes of length, 4 bits of type, 4 bits of flags, and 4 bytes with the number of its
# stream. A stream begins with 4 bytes for its type.
_RESET, _DATA, _WINDOW = 0, 1, 2  # types of frames
_FIN, _SYN = 1, 2  # flags of frames
_LOGIN, _BIND, _UNBIND, _PROXY, _HEARTBEAT = 0, 1, 2, 3, 0xFFFFFFFF  # types of streams


def make_certificate() -> tuple[bytes, bytes]:
    """Return a self-signed certificate for localhost and its private key, both in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(hours=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class FakeNgrok:
    """Fake ngrok server: TLS, streams within one connection, and the calls that open a TCP endpoint.

    Connections to the endpoint pass through the real SDK. The server runs in a background thread.

    :param refuse_login: error to answer a login with
    :param refuse_endpoint: error to answer a request for an endpoint with
    """

    def __init__(self, refuse_login: str = "", refuse_endpoint: str = ""):
        self.refusals = {_LOGIN: refuse_login, _BIND: refuse_endpoint}
        self.port = self.public_port = 0  # for the SDK, and of the newest endpoint
        self.tokens: list[str] = []  # of all logins
        self.bytes_passed = 0
        self.was_told_to_close = False
        self.certificate, key = make_certificate()
        self._sessions: list[_Session] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "both.pem").write_bytes(self.certificate + key)
            self._context.load_cert_chain(Path(folder) / "both.pem")

    @property
    def is_open(self) -> bool:
        """Whether there is a session, which may have an endpoint."""
        return any(session.is_open for session in self._sessions)

    def __enter__(self) -> "FakeNgrok":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(timeout=120)
        return self

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]

    def __exit__(self, *_exception) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._server.close()
        for session in self._sessions:
            session.close()
        self._loop.call_soon(self._loop.stop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = _Session(self, reader, writer)
        self._sessions.append(session)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            await session.read_frames()
        session.close()


class _Session:
    """One connection of the SDK."""

    def __init__(self, server: FakeNgrok, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.server, self.reader, self.writer = server, reader, writer
        self.is_open = True
        self._endpoint: asyncio.Server | None = None
        self._requests: dict[int, bytes] = defaultdict(bytes)  # stream -> bytes received so far
        self._visitors: dict[int, asyncio.StreamWriter] = {}
        self._last_stream = 0

    def close(self) -> None:
        self.is_open = False
        if self._endpoint is not None:
            self._endpoint.close()
        self.writer.transport.abort()

    def _send(self, kind: int, flags: int, stream: int, body: bytes = b"") -> None:
        if not self.writer.is_closing():
            self.writer.write(struct.pack(">II", len(body) << 8 | kind << 4 | flags, stream) + body)

    async def read_frames(self) -> None:
        while True:
            head, stream = struct.unpack(">II", await self.reader.readexactly(8))
            body = await self.reader.readexactly(head >> 8)
            kind, flags = head >> 4 & 15, head & 15
            if kind == _DATA and body:
                self._send(_WINDOW, 0, stream, struct.pack(">I", len(body)))
                if stream not in self._visitors:
                    await self._answer(stream, body)
            if stream in self._visitors and kind in (_DATA, _RESET):
                self.server.bytes_passed += len(body)
                self._visitors[stream].write(body)
                if kind == _RESET or flags & _FIN:
                    self._visitors.pop(stream).close()

    async def _answer(self, stream: int, body: bytes) -> None:
        self._requests[stream] += body
        kind, request = self._requests[stream][:4], self._requests[stream][4:]
        if kind == struct.pack(">I", _HEARTBEAT):
            self._send(_DATA, 0, stream, request)
            self._requests[stream] = kind
            return
        with contextlib.suppress(json.JSONDecodeError):  # the request is incomplete
            answer = await self._call(struct.unpack(">I", kind)[0], json.loads(request))
            self._send(_DATA, _FIN, stream, json.dumps(answer).encode())

    async def _call(self, kind: int, request: dict) -> dict:
        if refusal := self.server.refusals.get(kind):
            return {"Error": refusal}
        if kind == _LOGIN:
            self.server.tokens.append(request["Extra"]["AuthToken"])
            return {"Version": request["Version"][0], "ClientId": "client", "Extra": {}}
        if kind == _BIND:
            self._endpoint = await asyncio.start_server(self._let_in, "127.0.0.1", 0)
            self.server.public_port = port = self._endpoint.sockets[0].getsockname()[1]
            return {"Id": "endpoint", "URL": f"tcp://localhost:{port}", "Proto": "tcp", "Opts": request["Opts"],
                    "Extra": {"Token": "token"}}  # fmt: skip
        self.server.was_told_to_close |= kind == _UNBIND
        return {}

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a connection to the endpoint on to the SDK, in a new stream."""
        self._last_stream = stream = self._last_stream + 2
        self._visitors[stream] = writer
        header = {"Id": "endpoint", "ClientAddr": "127.0.0.1:1", "Proto": "tcp", "EdgeType": "1",
                  "PassthroughTLS": False}  # fmt: skip
        header = json.dumps(header).encode()
        self._send(_DATA, _SYN, stream, struct.pack(">I", _PROXY) + struct.pack("<q", len(header)) + header)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**14):
                self.server.bytes_passed += len(data)
                self._send(_DATA, 0, stream, data)
                await self.writer.drain()
        self._send(_DATA, _FIN, stream)
