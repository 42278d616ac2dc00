"""Flags that the scripts share: one dataclass per topic, defined in cotrain/arguments.py.

The flags of a single script are in that script.
"""

from cotrain.arguments import (
    BASE_FOLDER,
    DATASET_FOLDERS,
    TRAINER_ARGUMENTS,
    BaseTrainingArguments,
    CollaborationArguments,
    DatasetArguments,
    HyperparameterArguments,
    LocalTrainingArguments,
    ModelArguments,
    OptimizerArguments,
    ProgressTrackerArguments,
    ReportingArguments,
    TrainerArguments,
    check_compression,
    parse_size,
    weight_files,
)
