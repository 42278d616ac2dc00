"""--pause_when_busy with a stand-in for NVIDIA's NVML, and processes that stand for games."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from cotrain.common.errors import UserError
from cotrain.training.gpu_programs import GpuPrograms


class NotFound(Exception):
    """NVML's error for a GPU on which nobody has computed since the given time."""


class FakeNvml:
    """NVML of one GPU. `loads`: process ID -> percent of the GPU's time."""

    NVMLError_NotFound = NotFound

    def __init__(self, pids: list[int]):
        self.pids, self.loads, self.age = pids, {}, 0.0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1234"
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, _gpu) -> list:
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetProcessUtilization(self, _gpu, since: int) -> list:
        if not self.loads:
            raise NotFound
        stamp = int(1e6 * (time.time() - self.age))
        return [SimpleNamespace(pid=pid, smUtil=load, timeStamp=stamp) for pid, load in self.loads.items()]


@pytest.fixture
def nvml(monkeypatch) -> FakeNvml:
    nvml = FakeNvml([os.getpid(), 1])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    return nvml


def test_a_game_is_found_and_neither_this_process_nor_a_desktop_is(nvml):
    programs = GpuPrograms(torch.device("cuda:0"))
    assert programs.find() == ""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as game:
        nvml.loads = {os.getpid(): 99, 1: 4, game.pid: 60}
        assert programs.find().startswith("python")
        nvml.age = 3600.0
        assert programs.find() == "", "an old measurement, which NVML keeps"
        nvml.age = 0.0
        game.communicate(b"\n")
    assert programs.find() == "", "it has ended, and NVML lists it still"


@pytest.mark.parametrize("fault", ["no package", "no driver", "a container"])
def test_where_it_cannot_work_it_says_so(nvml, monkeypatch, fault):
    if fault == "no package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif fault == "no driver":
        nvml.nvmlInit = lambda: (_ for _ in ()).throw(OSError("no libnvidia-ml.so.1"))
    else:
        nvml.pids = [1, 2]
    with pytest.raises(UserError, match="--pause_when_busy: .*--only_between") as error:
        GpuPrograms(torch.device("cuda:0"))
    assert "\n" not in str(error.value)
