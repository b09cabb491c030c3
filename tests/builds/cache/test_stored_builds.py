"""Builds in the cache: damage, the file systems that hold them, the owners of their folders.

The fixtures are in `conftest.py`, and the tiny extension in `support/tiny_build.py`.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.utils.cpp_extension

from kernels.build import cache
from referee.testing.mounts import mounted
from tests.support.tiny_build import (
    OTHER,
    SOURCES,
    STRANGER,
    builders,
    folders_of_builds,
    needs_root,
)


def shorten(path):
    os.truncate(path, path.stat().st_size // 2)


def change_a_bit(library):
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


# By name, a function of a library's path that damages its finished build.
DAMAGES = {
    "shortened": shorten,
    "a bit changed": change_a_bit,
    "missing": Path.unlink,
    "another manifest": lambda library: library.with_name("manifest.json").write_text("[]"),
    "torn manifest": lambda library: shorten(library.with_name("manifest.json")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_build_is_built_again(root, load, damage, tmp_path):
    library = load()
    damage(library)
    again = load()
    assert folders_of_builds(root) == [again.parent]
    assert len(builders(tmp_path)) == 2
    assert load() == again
    assert len(builders(tmp_path)) == 2


def test_a_build_that_cannot_be_read_now_is_kept(load, monkeypatch):
    library = load()

    def fail(_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        assert not [*cache.finished_builds(library.parent.parent, library.stem)]
    assert library.exists()


def test_a_build_that_does_not_load_here_is_kept_for_other_machines(root, load):
    """A library that was linked to a newer glibc is an example."""
    library = load()
    library.write_bytes(b"foreign")
    manifest = json.loads((library.parent / "manifest.json").read_text())
    manifest["sha256"] = hashlib.sha256(library.read_bytes()).hexdigest()
    (library.parent / "manifest.json").write_text(json.dumps(manifest))
    again = load()
    assert set(folders_of_builds(root)) == {library.parent, again.parent}
    assert load() == again


def test_a_build_has_another_name_if_its_machine_code_may_differ(monkeypatch, root, load):
    names = [load().stem, load(sources={**SOURCES, "tiny/tiny.h": ""}).stem]
    for variable in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "-g")
            names.append(load().stem)
    attributes = [
        (torch.version, "git_version", "another"),
        (torch, "__version__", "another"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"),
    ]
    for owner, attribute, value in attributes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            names.append(load().stem)
    assert len(set(names)) == len(names) - 1  # one of the last two is this machine's own


def test_another_compiler_builds_again_but_another_name_of_it_does_not(monkeypatch, load, tmp_path):
    monkeypatch.delenv("CXX", raising=False)  # the user's own may be a third compiler
    library = load()
    for name in ("c++", "g++", shutil.which("c++")):
        monkeypatch.setenv("CXX", name)
        assert load() == library
    other = tmp_path / "other-c++"
    other.write_text("#!/bin/sh\necho other-c++ 99.1 'Free Software Foundation'\n")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    again = load()
    assert again != library
    assert load() == again
    monkeypatch.setenv("CXX", "/nowhere/c++")  # as on a machine without a compiler
    assert load() in (library, again)


# A library has about 15 KiB, so these disks are full at different moments of a build.
@pytest.mark.parametrize("size", [4, 8, 12, 16])
def test_a_full_disk_gives_an_error_and_leaves_nothing(root, load, fail, size):
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", f"size={size}k,mode=755", "none", root):
        (root / f"kernels-{os.geteuid()}").mkdir(mode=0o700)
        error = fail()
        assert "No space left on device" in error.splitlines()[0]
        assert "TORCH_EXTENSIONS_DIR" in error
        assert not folders_of_builds(root)
        subprocess.run(["mount", "-o", "remount,size=16m", root], check=True)
        load()


def test_builds_of_a_read_only_file_system_are_loaded(root, load, fail):
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=16m,mode=755", "none", root):
        library = load()
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        assert load() == library
        assert "Read-only file system" in fail(sources=OTHER)


def test_a_noexec_file_system_gives_an_error_before_anything_is_compiled(
    root, load, fail, tmp_path
):
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=16m,mode=755,noexec", "none", root):
        error = fail()
    assert "is on a file system that is mounted noexec" in error
    assert "Set TORCH_EXTENSIONS_DIR to a folder on another file system" in error
    assert not builders(tmp_path)


def test_the_default_folder_is_used_if_a_folder_can_not_be_made(
    root, start, monkeypatch, open_path
):
    """The default folder is torch's. The first line of output says that it is used."""
    root.write_text("a file")
    for place in (str(root), "/proc/cache"):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", place)
        status, output = start().wait()
        assert status == 0
        first, library = output.splitlines()
        assert f"no builds are kept in {place}: " in first
        assert Path(library).is_relative_to(open_path / "default" / "torch_extensions")


@pytest.mark.parametrize("home", ["a file", "none"])
def test_a_user_without_a_folder_gets_a_temporary_one(
    root, start, monkeypatch, open_path, home, tmp_path
):
    """The temporary folder is private, and is removed when the process ends."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    if home == "none":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(cache.os.path, "expanduser", lambda path: path)
    else:
        (open_path / "default").write_text("a file")
    for _ in range(2):
        status, output = start(at_exit=True).wait()
        assert status == 0
        library = Path(output.splitlines()[-1])
        assert library.is_relative_to(tmp_path)
        assert "nothing is kept when this process ends" in output
        assert "Set TORCH_EXTENSIONS_DIR to a folder that you may write to" in output
        assert not library.exists()
    assert len(builders(tmp_path)) == 2


def test_a_user_who_may_not_write_anywhere_gets_an_error(root, fail, monkeypatch, open_path):
    root.write_text("a file")
    (open_path / "default").write_text("a file")
    monkeypatch.setattr(cache.tempfile, "tempdir", "/proc")
    assert "no folder for builds: " in fail()


@pytest.mark.parametrize("name", ["with spaces", "größe 测试", "it's", "relative"])
def test_paths_may_have_any_characters_or_be_relative(monkeypatch, tmp_path, load, name):
    folder = tmp_path / name
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", name if name == "relative" else str(folder))
    assert load(lambda: os.chdir(tmp_path)).is_relative_to(folder)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nobody_else_may_enter_the_folder(root, load, mask):
    """The umask does not change the mode of the user's folder, only that of the folder above."""
    library = load(lambda: os.umask(mask))
    assert load() == library
    assert library.parent.parent.stat().st_mode & 0o777 == 0o700
    assert root.stat().st_mode & 0o777 == 0o777 & ~mask


def test_a_folder_that_others_may_enter_is_closed(root, load):
    library = load()
    folder = library.parent.parent
    folder.chmod(0o777)
    assert load() == library
    assert folder.stat().st_mode & 0o777 == 0o700


def test_builds_are_loaded_and_made_on_a_file_system_without_modes(root, load, monkeypatch):
    """On such a file system, for example a network drive, chmod may fail."""
    library = load()
    library.parent.parent.chmod(0o775)

    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "fchmod", refuse)
    monkeypatch.setattr(Path, "chmod", refuse)
    assert load() == library
    assert load(sources=OTHER) != library


def give_to_stranger(path):
    """Give a folder and everything in it to another user."""
    for place in (path, *path.rglob("*")):
        os.chown(place, STRANGER, STRANGER, follow_symlinks=False)


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_of_another_user_is_refused(root, load, start, open_path, kind):
    """In a folder such as /tmp, where everybody can make folders, another user may be first."""
    folder = load().parent.parent
    if kind == "folder":
        give_to_stranger(folder)
    else:
        folder.rename(open_path / "elsewhere")
        folder.symlink_to(open_path / "elsewhere")
    root.chmod(0o1777)
    status, output = start().wait()
    assert status == 0
    reason = f"belongs to user {STRANGER}" if kind == "folder" else "is not a folder"
    assert f"no builds are kept in {root}: {folder} {reason}" in output
    assert Path(output.splitlines()[-1]).is_relative_to(open_path / "default")


@needs_root
def test_a_library_of_another_user_is_not_loaded(root, load, tmp_path):
    """Another user may have put the library there while the folder was open to others."""
    library = load()
    os.chown(library, STRANGER, STRANGER)
    load()
    assert len(builders(tmp_path)) == 2


@needs_root
def test_users_have_folders_of_their_own(root, load):
    """Two users can share a folder that everybody may write to."""
    root.mkdir(mode=0o777)
    root.chmod(0o1777)
    libraries = [load(), load(lambda: os.setuid(STRANGER))]
    owners = [library.parent.parent.stat().st_uid for library in libraries]
    assert owners == [0, STRANGER]


@needs_root
@pytest.mark.parametrize(
    ("mode", "user", "group"),
    [
        pytest.param(0o755, STRANGER, STRANGER, id="root with another user's home"),
        pytest.param(0o2775, 0, 100, id="a home that the group may write to"),
        pytest.param(0o777, STRANGER, 0, id="a volume that belongs to somebody else"),
    ],
)
def test_parent_folders_may_have_any_owner_and_mode(root, load, open_path, mode, user, group):
    """Homes in containers and on shared machines may belong to other users."""
    root.mkdir()
    os.chown(root, user, group)
    root.chmod(mode)
    library = load()
    assert library.is_relative_to(root)
    assert load() == library


@needs_root
def test_any_user_id_with_group_root_can_build_in_a_folder_of_this_group(root, load):
    """OpenShift starts containers with user ids that are in no list of users."""
    root.mkdir()
    os.chown(root, 0, 0)
    root.chmod(0o775)

    def become_user_without_a_name():
        os.setgroups([])
        os.setgid(0)
        os.setuid(1000690000)

    library = load(become_user_without_a_name)
    assert library.is_relative_to(root)
    assert load(become_user_without_a_name) == library
