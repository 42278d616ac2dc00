"""OpenMP threads of the background threads that compute."""

import torch
from threadpoolctl import threadpool_limits


def use_one_core() -> None:
    """Limit the calling thread to one OpenMP thread.

    With more OpenMP threads in a process than there are cores, GNU's library puts idle ones to sleep instead of
    letting them spin. Each operation of the main thread then has to wake them, which took 12 to 47 % of the speed of
    a trainer on two cores.
    """
    torch.get_num_threads()  # torch sets the limit of a thread at its first use
    threadpool_limits(1, user_api="openmp")
