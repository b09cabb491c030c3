"""How much memory is free, and how large an input fits."""

import os
from pathlib import Path

import torch

# Input-sized tensors alive at once in a training step: the inputs, the output, its gradient, the
# input's gradient, and one for what is kept for the backward. Forwards alone need fewer.
BUFFERS = {"cpu": 5, "cuda": 7}
RING = {"cpu": 1, "cuda": 3}
# On a CPU the default leaves the machine to its owner; a GPU is taken whole.
DEFAULT_SHARE = {"cpu": 0.25, "cuda": 0.9}
LARGEST_SHARE = 0.9


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on the device; on the CPU within the control group's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([_system_free(), *_cgroup_free()])


def choose_rows(
    wanted: int | None,
    rows: int,
    row_bytes: int,
    device: torch.device,
    fixed_bytes: int = 0,
    buffers: int | None = None,
) -> tuple[int, str]:
    """The number of rows to measure, and a sentence that says why it is not `rows`, or "".

    Without `wanted`, as many of `rows` as fit in the default share of the free memory, beside
    what is needed whatever their number.

    Args:
        buffers: tensors of the input's size that are alive at once; by default BUFFERS.

    Raises:
        ValueError: `wanted` rows, or a single one, need more memory than there is.
    """
    free = free_bytes(device)
    each = (buffers or BUFFERS[device.type]) * row_bytes
    share = LARGEST_SHARE if wanted else DEFAULT_SHARE[device.type]
    largest = (int(free * share) - fixed_bytes) // each
    count = wanted or min(rows, largest)
    if count > largest or count < 1:
        count = max(count, 1)
        raise ValueError(
            f"{count:,} rows need {(count * each + fixed_bytes) / 2**30:,.1f} GiB of memory on "
            f"{device}, and {free * share / 2**30:,.1f} GiB can be used"
        )
    if wanted or count == rows:
        return count, ""
    part = "a quarter" if device.type == "cpu" else "90%"
    return count, (
        f"{count:,} of {rows:,} rows: a training step takes up to {part} of the "
        f"{free / 2**30:,.1f} GiB free"
    )


def _system_free() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: the memory there is, the nearest thing os can say
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes) * 1024


def _cgroup_free(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """Bytes that each control group with a limit above this process has left."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:  # "0::/group" for version 2, "4:memory:/group" for version 1
        _, controllers, own = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            for mount in (root, root / "unified"):  # the latter beside version 1
                left += _hierarchy_free(mount, own, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left += _hierarchy_free(root / "memory", own, *names)
    return left


def _hierarchy_free(mount: Path, own: str, limit: str, usage: str, inactive: str) -> list[int]:
    """`_cgroup_free` of one hierarchy, for the group `own` and those above it.

    A container may see its own group as the root, and be told the host's path of it: groups that
    are not there are passed over.
    """
    left, group = [], mount / own.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            break
        try:
            most = (folder / limit).read_text().strip()
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").open())
        except OSError:
            continue
        if most != "max":  # cached files count as used, but make room on demand
            left.append(max(0, int(most) - used + int(stat[inactive])))
    return left
