"""How much memory is free, and how large an input fits."""

from contextlib import suppress
from pathlib import Path
from time import sleep

import torch

# Buffers of the input's size that all processes together hold.
BUFFERS = {"cpu": 9, "cuda": 10}
# On a CPU the default leaves the machine to its owner; a GPU is taken whole.
DEFAULT_SHARE = {"cpu": 0.25, "cuda": 0.9}
PARTS = {"cpu": "a quarter", "cuda": "90%"}  # the same in words
LARGEST_SHARE = 0.9
LARGEST_UNUSED = 1 << 32  # bytes that this process's allocator may keep from others on a GPU
KEPT_AND_USED = "reserved_bytes", "allocated_bytes"  # torch's names of its allocator's statistics
# The driver clears memory that was given back while others already compute, and slows them.
SECONDS_TO_CLEAR = 0.05
# Files of a control group: its limit, what is used, and others, of which one key counts.
VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"
VERSION_2 = "memory.max", "memory.current", "memory.stat", "inactive_file"


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated; on a CPU, control groups may limit them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return min([int(kilobytes) * 1024, *_cgroup_free()])


def give_back_unused(device: torch.device) -> None:
    """Give back the memory of a GPU that torch keeps for later, if it is much."""
    statistics = torch.cuda.memory_stats_as_nested_dict(device)  # in far less time than by its keys
    kept, used = (statistics[key]["all"]["current"] for key in KEPT_AND_USED)
    if kept - used > LARGEST_UNUSED:
        torch.cuda.empty_cache()
        sleep(SECONDS_TO_CLEAR)


def choose_rows(
    asked: int | None, rows: int, row_bytes: int, device: torch.device, fixed_bytes: int = 0
) -> tuple[int, str]:
    """Return how many rows are measured; and, if these are not all, why, else "".

    Args:
        asked: how many rows the user asks for; None for as many as fit in the default share of
            the free memory.
        rows: of the whole problem.
        row_bytes: of a row of the input.
        device: where they are measured.
        fixed_bytes: that are needed beside the rows.

    Raises:
        ValueError: `asked` rows, or a single one, need more memory than there is.
    """
    free = free_bytes(device)
    each = BUFFERS[device.type] * row_bytes
    share = LARGEST_SHARE if asked else DEFAULT_SHARE[device.type]
    largest = (int(free * share) - fixed_bytes) // each
    count = asked or max(1, min(rows, largest))
    if count > largest:
        needed = (count * each + fixed_bytes) / 2**30
        raise ValueError(
            f"{count:,} rows need {needed:,.1f} GiB of memory on {device}, and "
            f"{free * share / 2**30:,.1f} GiB can be used"
        )
    if asked or count == rows:
        return count, ""
    part = PARTS[device.type]
    why = f"all processes together take up to {part} of the {free / 2**30:,.1f} GiB free"
    return count, f"{count:,} of {rows:,} rows: {why}"


def _cgroup_free(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """Return the bytes that are left in each control group with a limit above this process.

    A container may see its own group as the root, and be told the host's path of it: groups that
    are not there are passed over.
    """
    left: list[int] = []
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:  # "0::/group" for version 2, "4:memory:/group" for version 1
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, names = (root / "memory", VERSION_1) if controllers else (root, VERSION_2)
        group = mount / own.strip("/")
        for folder in (group, *group.parents):
            with suppress(OSError):
                limit, used, stat = ((folder / name).read_text().strip() for name in names[:3])
                freed = dict(entry.split() for entry in stat.splitlines())[names[3]]
                if limit != "max":  # cached files count as used, but make room on demand
                    left.append(max(0, int(limit) - int(used) + int(freed)))
    return left
