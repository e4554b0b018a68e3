"""What this machine is, how much of its memory is free, how fast it can be read, and what time it is."""

import os
import platform
import time

import torch


def describe(device):
    """What the numbers were measured on: without it they mean nothing."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    elif os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            name = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), name)
    return {"device": str(device), "name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def free_memory(device):
    """In bytes, of the GPU or of this machine (on Linux, of its container). None where it cannot be told."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    known = []
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as f:
            known += [int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable")]
    used, limit = "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.max"
    if os.path.exists(used) and os.path.exists(limit):
        with open(used) as f, open(limit) as g:
            now, most = f.read().strip(), g.read().strip()
        known += [int(most) - int(now)] if most.isdigit() else []
    if not known and hasattr(os, "sysconf"):  # macOS tells the total. About half of that can usually be had
        known = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]
    return min(known, default=None)


def read_bandwidth(device, repeat=3):
    """In GB/s, the best of several: two vectors of 128 MB each, multiplied and added up, ten times over."""
    a, b = (torch.ones(2**25, device=device) for _ in range(2))
    seconds = []
    for _ in range(repeat):
        start = now(device)
        for _ in range(10):  # once would take a fast GPU no longer than to start it
            torch.dot(a, b)
        seconds.append(now(device) - start)
    return 10 * 2 * a.nbytes / min(seconds) / 1e9


def now(device):
    """Seconds on a clock, once the device has done what it was asked."""
    if device.type != "cpu":  # where Python runs ahead of the kernels
        torch.accelerator.synchronize()
    return time.perf_counter()
