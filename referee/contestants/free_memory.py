"""Says how much memory is free, and gives back what a GPU's cache keeps."""

from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import NamedTuple

import torch

# How many tensors of the input's size all processes hold at the same time.
BUFFERS = {"cpu": 9, "cuda": 10}
MAX_SHARE_OF_FREE = 0.9  # of the free memory that the referee uses
# This process's CUDA allocator may keep this many bytes unused, or this share of the free memory.
MAX_CACHED_BYTES = 1 << 32
MAX_CACHED_SHARE = 0.25
# How long the referee waits until the driver has cleared memory that was given back. Clearing slows
# the work of other processes.
SECONDS_TO_CLEAR = 0.05


class _CgroupFiles(NamedTuple):
    """Where a control group says how much memory it has.

    Attributes:
        limit: the file with its limit in bytes, or "max".
        usage: the file with the bytes in use, cached files included.
        cache_key: the key in memory.stat of the cached bytes that the kernel frees on demand.
    """

    limit: str
    usage: str
    cache_key: str


VERSION_1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can be allocated; on a CPU, control groups may limit them."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free
    lines = Path("/proc/meminfo").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return min([int(kilobytes) * 1024, *_cgroup_free()])


def give_back_unused(device: torch.device) -> None:
    """Give the memory that torch caches back to the GPU, if it caches more than it may keep."""
    # This function takes far less time than torch.cuda.memory_reserved and memory_allocated.
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    reserved = statistics["reserved_bytes"]["all"]["current"]
    allocated = statistics["allocated_bytes"]["all"]["current"]
    unused = reserved - allocated
    if unused > MAX_CACHED_BYTES and unused > MAX_CACHED_SHARE * free_bytes(device):
        torch.cuda.empty_cache()
        sleep(SECONDS_TO_CLEAR)


def _cgroup_free(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """Return the free bytes of each control group that limits this process.

    These are its own group and the groups above, if they have a limit. A folder that is no control
    group is skipped. Example: in a container, `membership` may have the host's name of the group,
    "/docker/1a2b", while the group itself is mounted at `root`: there is no folder docker/1a2b.

    Args:
        root: where control groups are mounted.
        membership: the file that names this process's groups, with lines like "0::/group"
            (version 2) or "4:cpu,memory:/group" (version 1, with its controllers).
    """
    free: list[int] = []
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, files = root, VERSION_2
        elif "memory" in controllers.split(","):
            mount, files = root / "memory", VERSION_1
        else:
            continue
        group = mount / path.strip("/")
        for folder in (group, *group.parents):
            with suppress(OSError):  # no control group, as the folders above `mount`
                free += _free_in_group(folder, files)
    return free


def _free_in_group(folder: Path, files: _CgroupFiles) -> list[int]:
    """Return the free bytes of one control group, in a list; an empty list if it has no limit.

    Raises:
        OSError: the folder is no control group.
    """
    limit = (folder / files.limit).read_text().strip()
    used = (folder / files.usage).read_text()
    entries = (folder / "memory.stat").read_text().splitlines()
    cached = dict(entry.split() for entry in entries)[files.cache_key]
    if limit == "max":
        return []
    return [max(0, int(limit) - int(used) + int(cached))]
