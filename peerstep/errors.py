"""The error of this package."""

from collections.abc import Mapping


class PeerError(Exception):
    """An error in one line: what is wrong and what to do. It names the parameter of the call that it is about.

    :param retryable: whether the same call may succeed later, as when other peers do not answer
    :param answers: what peers have answered that refuse this one, by peer ID
    """

    retryable = False

    def __init__(self, message: str, retryable: bool | None = None, answers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.answers = dict(answers or {})
        if retryable is not None:
            self.retryable = retryable
