"""The description of prepared data."""

import pytest

from cotrain.common.errors import UserError
from cotrain.data.manifest import Manifest


def test_folder_that_holds_no_prepared_data_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"'.*' has no manifest\.json; pass the folder that has it, or create the data"
    ):
        Manifest.load(tmp_path)
