"""What this machine is, and how much of its memory is free."""

import os
import platform

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
