"""Train one model with peers that come and go: one optimizer step of all of them at a time. See README.md."""

from importlib import import_module

_HOMES = {
    "CollaborativeOptimizer": "optimizer",
    "LocalUpdates": "step.local_updates",
    "Options": "options",
    "StepRecord": "step.coordinator",
    "LocalPeer": "local_peer",
    "PeerError": "errors",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> type:
    """Import a public name at its first use: torch and hivemind take seconds."""
    if name not in _HOMES:
        raise AttributeError(f"peerstep has no {name}")
    return getattr(import_module(f"peerstep.{_HOMES[name]}"), name)
