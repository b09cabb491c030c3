"""How much memory the referee takes: what is free, within the limits of control groups."""

from pathlib import Path

import pytest
import torch

from problems import sizes
from referee.contestants import memory

CPU = torch.device("cpu")


def test_as_many_rows_are_chosen_as_fit_into_memory(monkeypatch):
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 2000)
    assert sizes.choose_rows(None, 4, 10, CPU) == (4, "")
    rows, note = sizes.choose_rows(None, 4096, 10, CPU)
    assert rows == 5
    assert note.startswith("5 of 4,096 rows")
    assert sizes.choose_rows(20, 4096, 10, CPU) == (20, "")
    assert sizes.choose_rows(None, 4096, 10, CPU, 400)[0] == 1
    with pytest.raises(ValueError, match="1 rows need"):
        sizes.choose_rows(None, 4096, 10, CPU, 500)
    for wanted, size in [(21, 10), (None, 56)]:
        with pytest.raises(ValueError, match="GiB"):
            sizes.choose_rows(wanted, 4096, size, CPU)


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("mount", "line", "groups", "names", "left"),
    [
        ("", "0::/outer/inner", {"outer/inner": "max", "outer": "1000"}, V2, [400]),
        ("", "0::/outer", {"outer": "1000", "": "900"}, V2, [400, 300]),
        ("", "0::/", {"outer": "1000"}, V2, []),
        ("memory", "4:memory:/outer/inner", {"outer/inner": "800", "outer": "900"}, V1, [200, 300]),
        ("memory", "4:cpu,memory:/outer", {"outer": "500"}, V1, [0]),
        ("memory", "4:memory:/docker/of/the/host", {"": "1000"}, V1, [400]),
        ("memory", "4:cpu:/outer", {"outer": "1000"}, V1, []),
    ],
)
def test_control_groups(tmp_path: Path, mount, line, groups, names, left):
    """700 of 1,000 bytes are used, 100 of them by files that make room."""
    root = tmp_path / "root"
    membership = tmp_path / "cgroup"
    for group, limit in groups.items():
        folder = root / mount / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text("700\n")
        (folder / "memory.stat").write_text(f"anon 500\n{names[2]} 100\n")
    membership.write_text(f"1:name=systemd:/\n{line}\n")
    assert memory._cgroup_free(root, membership) == left
    assert memory._cgroup_free(root, tmp_path / "absent") == []


def test_free_memory_is_within_the_control_group(monkeypatch):
    monkeypatch.setattr(memory, "_cgroup_free", lambda: [5000, 400])
    assert memory.free_bytes(CPU) == 400
