from typing import Any

from google.protobuf.message import Message

class Tensor(Message):
    buffer: bytes
    size: Any
    requires_grad: bool
    dtype: str
    compression: int
    chunks: int
    def __init__(self, **fields: Any) -> None: ...

def __getattr__(name: str) -> Any: ...
