"""Other programs on this process's GPU, for --pause_when_busy."""

import os
import time
from importlib import import_module

import psutil
import torch

from cotrain.common.errors import UserError

BUSY = 10  # percent of the GPU's time; a desktop and a video take less, a game more


class GpuPrograms:
    """Names a program that computes on a GPU beside this process, as NVIDIA's library NVML measures it.

    :raises UserError: if NVML does not tell the programs apart: no NVIDIA GPU, WSL, a container, a part of a GPU (MIG)
    """

    def __init__(self, device: torch.device):
        self._since = time.time()
        try:
            self.nvml = import_module("pynvml")
            self.nvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self.gpu = self.nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            pids = {process.pid for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.gpu)}
            self.find()
        except Exception as error:
            raise UserError(
                f"--pause_when_busy: NVIDIA's NVML does not answer here ({type(error).__name__}: {error}). It needs "
                "an NVIDIA GPU and pip install nvidia-ml-py; pass --only_between instead, or call --pause"
            ) from None
        if os.getpid() not in pids:
            raise UserError(
                "--pause_when_busy: NVML does not know this process, as in a container or WSL, and would take it for "
                "another program: drop the flag; pass --only_between instead, or call --pause"
            )

    def find(self) -> str:
        """Return the name of the busiest other program since the last call; empty if none takes BUSY percent."""
        since, self._since = self._since, time.time()
        try:
            samples = self.nvml.nvmlDeviceGetProcessUtilization(self.gpu, int(since * 1e6))
        except self.nvml.NVMLError_NotFound:  # nobody has computed
            return ""
        busy = [x for x in samples if x.smUtil >= BUSY and x.timeStamp > since * 1e6 and x.pid != os.getpid()]
        for sample in sorted(busy, key=lambda sample: -sample.smUtil):
            try:
                return psutil.Process(sample.pid).name()
            except psutil.NoSuchProcess:
                continue  # NVML's samples outlive a program
        return ""
