"""Fixtures of the tests of the training state."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.state_swarm import StateSwarm


@pytest.fixture
def swarm(network) -> Iterator[StateSwarm]:
    """Connected peers in this process, each with a state averager."""
    with ExitStack() as stack:
        yield StateSwarm(stack, network)
