"""Models for tests and benchmarks that need no task."""

from transformers import PretrainedConfig, PreTrainedModel

from cotrain.models.model import initialize_model, seeded_by


def build_model(config: PretrainedConfig, run_id: str) -> PreTrainedModel:
    """Build a model with the initial weights of a run."""
    with seeded_by(run_id):
        return initialize_model(config)
