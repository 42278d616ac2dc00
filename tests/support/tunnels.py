"""Fake tunnels: a TCP forwarder, and ngrok's servers."""

import asyncio
import contextlib
import datetime
import json
import ssl
import struct
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

# ngrok's protocol: a frame has 3 bytes of length, 4 bits of type, 4 bits of flags, and 4 bytes with the number of its
# stream. A stream begins with 4 bytes for its type.
_RESET, _DATA, _WINDOW, _GO_AWAY = 0, 1, 2, 3  # types of frames
_FIN, _SYN = 1, 2  # flags of frames
_LOGIN, _BIND, _UNBIND, _PROXY, _HEARTBEAT = 0, 1, 2, 3, 0xFFFFFFFF  # types of streams


class _Server:
    """An asyncio server in a background thread."""

    def __init__(self):
        self.bytes_passed = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True)

    def __enter__(self):
        self._thread.start()
        self.run(self.start())
        return self

    def __exit__(self, *_exception) -> None:
        self.break_down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def run(self, coroutine: Coroutine) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10)

    def break_down(self) -> None:
        """Close all connections and stop accepting new ones."""
        self.run(self.stop())

    def repair(self) -> None:
        """Start again, at the same port."""
        self.run(self.start())


class Forwarder(_Server):
    """Forwards TCP connections to another port of this machine, as bore, frp, `ssh -R` or a router does."""

    def __init__(self, target_port: int):
        super().__init__()
        self.port, self.target_port = 0, target_port
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, target_writer}
        await asyncio.gather(self._pass(reader, target_writer), self._pass(target_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                self.bytes_passed += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()
        self._writers.discard(writer)


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


class FakeNgrok(_Server):
    """Fake ngrok server: TLS, streams within one connection, and the calls that open a TCP endpoint.

    Connections to the endpoint pass through the real SDK.

    :param refuse_login: error to answer a login with
    :param refuse_endpoint: error to answer a request for an endpoint with
    :param silent: whether to answer no request
    """

    def __init__(self, refuse_login: str = "", refuse_endpoint: str = "", silent: bool = False):
        super().__init__()
        self.refusals = {_LOGIN: refuse_login, _BIND: refuse_endpoint}
        self.silent = silent
        self.port = self.public_port = 0  # for the SDK, and of the endpoint
        self.tokens: list[str] = []  # of all logins
        self.sessions: list[_Session] = []
        self.calls: list[int] = []
        self.certificate, key = make_certificate()
        self._endpoint: asyncio.Server | None = None
        self._owner: _Session | None = None
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "both.pem").write_bytes(self.certificate + key)
            self._context.load_cert_chain(Path(folder) / "both.pem")

    @property
    def is_open(self) -> bool:
        """Whether there is a session or an endpoint."""
        return self._endpoint is not None or not all(session.has_ended for session in self.sessions)

    @property
    def was_told_to_close(self) -> bool:
        return _UNBIND in self.calls

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        await self.close_endpoint(self._owner)
        for session in self.sessions:
            session.writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = _Session(self, reader, writer)
        self.sessions.append(session)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            await session.read_frames()
        session.has_ended = True
        await self.close_endpoint(session)
        writer.transport.abort()

    async def open_endpoint(self, session: "_Session") -> int:
        await self.close_endpoint(self._owner)  # a session that reconnects still has one
        self._endpoint = await asyncio.start_server(session.let_in, "127.0.0.1", self.public_port)
        self._owner, self.public_port = session, self._endpoint.sockets[0].getsockname()[1]
        return self.public_port

    async def close_endpoint(self, session: "_Session | None") -> None:
        if self._endpoint is not None and session is self._owner:
            self._endpoint.close()
            self._endpoint = None


class _Session:
    """One connection of the SDK."""

    def __init__(self, server: FakeNgrok, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.server, self.reader, self.writer = server, reader, writer
        self.has_ended = False
        self._requests: dict[int, bytes] = {}  # stream -> bytes received so far
        self._visitors: dict[int, asyncio.StreamWriter] = {}
        self._last_stream = 0

    def _send(self, kind: int, flags: int, stream: int, body: bytes = b"") -> None:
        if not self.writer.is_closing():
            self.writer.write(struct.pack(">II", len(body) << 8 | kind << 4 | flags, stream) + body)

    async def read_frames(self) -> None:
        while True:
            head, stream = struct.unpack(">II", await self.reader.readexactly(8))
            body = await self.reader.readexactly(head >> 8)
            kind, flags = head >> 4 & 15, head & 15
            if kind == _GO_AWAY:
                return
            if kind == _RESET and stream in self._visitors:
                self._visitors.pop(stream).close()
            elif kind == _DATA and stream in self._visitors:
                self._send(_WINDOW, 0, stream, struct.pack(">I", len(body)))
                await self._to_visitor(stream, body, bool(flags & _FIN))
            elif kind == _DATA and body and not self.server.silent:  # an empty frame ends an answered call
                self._send(_WINDOW, 0, stream, struct.pack(">I", len(body)))
                self._requests[stream] = self._requests.get(stream, b"") + body
                await self._answer(stream)

    async def _answer(self, stream: int) -> None:
        kind, request = self._requests[stream][:4], self._requests[stream][4:]
        if kind == struct.pack(">I", _HEARTBEAT):
            self._send(_DATA, 0, stream, request)
            self._requests[stream] = kind
            return
        with contextlib.suppress(json.JSONDecodeError):  # the request is incomplete
            answer = await self._call(struct.unpack(">I", kind)[0], json.loads(request))
            self._send(_DATA, _FIN, stream, json.dumps(answer).encode())

    async def _call(self, kind: int, request: dict) -> dict:
        self.server.calls.append(kind)
        if refusal := self.server.refusals.get(kind):
            return {"Error": refusal}
        if kind == _LOGIN:
            self.server.tokens.append(request["Extra"]["AuthToken"])
            return {"Version": request["Version"][0], "ClientId": "client", "Extra": {}}
        if kind == _BIND:
            port = await self.server.open_endpoint(self)
            return {"Id": "endpoint", "URL": f"tcp://localhost:{port}", "Proto": "tcp", "Opts": request["Opts"],
                    "Extra": {"Token": "token"}}  # fmt: skip
        await self.server.close_endpoint(self)
        return {}

    async def let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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

    async def _to_visitor(self, stream: int, body: bytes, is_last: bool) -> None:
        self.server.bytes_passed += len(body)
        with contextlib.suppress(ConnectionError):
            self._visitors[stream].write(body)
            await self._visitors[stream].drain()
            if is_last:
                self._visitors.pop(stream).close()
