"""DataParallel with mixed precision, for a peer with several GPUs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch


class AutocastDataParallel(torch.nn.DataParallel):
    """DataParallel whose replicas compute under autocast.

    transformers 5.23 enables autocast only for models that it does not wrap in DataParallel. Autocast around the call
    of DataParallel has another effect: each replica runs in a thread, with the default dtype of autocast, which is
    float16 on GPUs (torch/nn/parallel/parallel_apply.py).

    :param dtype: of autocast
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype):
        super().__init__(module)
        self.dtype = dtype
        self.device_type = next(module.parameters()).device.type

    def parallel_apply(self, replicas: Sequence[torch.nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        return super().parallel_apply([partial(self._apply_one, replica) for replica in replicas], inputs, kwargs)

    def _apply_one(self, replica: torch.nn.Module, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype):
            return replica(*inputs, **kwargs)
