"""A fake of ngrok's SDK: the public address of a tunnel is that of the peer on this machine."""


class FakeSessionBuilder:
    """Replaces `ngrok.SessionBuilder`, and is the session, the endpoint and the listener, too."""

    refusal: tuple[str, ...] = ()  # what the SDK raises ValueError with
    log: str | None = None  # file for what the SDK was asked to do

    def _note(self, text: str) -> None:
        if self.log is not None:
            with open(self.log, "a", encoding="utf-8") as file:
                print(text, file=file)

    def authtoken(self, token: str) -> "FakeSessionBuilder":
        self._note(f"token {token}")
        return self

    async def connect(self) -> "FakeSessionBuilder":
        if self.refusal:
            raise ValueError(*self.refusal)
        return self

    def tcp_endpoint(self) -> "FakeSessionBuilder":
        return self

    async def listen_and_forward(self, local: str) -> "FakeSessionBuilder":
        self._note(f"open {local}")
        self._port = local.rsplit(":", 1)[1]
        return self

    def url(self) -> str:
        return f"tcp://localhost:{self._port}"

    async def close(self) -> None:
        self._note("close")
