"""Columns of the prepared data and their types."""

import pyarrow as pa

from cotrain.models.objectives import OBJECTIVES

# Token ids need 16 to 18 bits; masks and labels fit into a byte.
_TYPES = {"input_ids": pa.list_(pa.int32()), "sentence_order_label": pa.int8()}  # of others: pa.list_(pa.int8())
SCHEMAS = {
    name: pa.schema({column: _TYPES.get(column, pa.list_(pa.int8())) for column in objective.columns})
    for name, objective in OBJECTIVES.items()
}
