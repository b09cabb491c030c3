"""Files that the command writes: whole or not at all, never in the place of a device or a link."""

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread
from time import sleep

import pytest

import referee
from referee.report import files
from referee.testing.mounts import mounted

ROOT = Path(referee.__file__).resolve().parents[1]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
SOMEBODY = 54321  # a user whom nothing belongs to


@pytest.fixture
def open_path():
    """Return a new folder that other users may enter; pytest's `tmp_path` is closed to them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder).resolve()


def child(code: str, **options) -> subprocess.CompletedProcess:
    """Run code that uses `files` in a new process, which must succeed."""
    command = [sys.executable, "-c", f"import os, sys\nfrom referee.report import files\n{code}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, check=True, **options)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_and_readers_keep_the_old_one(tmp_path):
    path = tmp_path / "file"
    files.write(path, "one")
    before = path.stat().st_ino
    with path.open() as reader:
        files.write(path, "two é")
        assert reader.read() == "one"
    assert path.read_bytes() == "two é".encode()
    assert path.stat().st_ino != before
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("bits", [0o600, 0o666, 0o751, None])
def test_files_have_the_mode_of_the_old_file_or_of_the_umask(tmp_path, bits):
    """An old file keeps its mode; a new one gets that of the umask."""
    path = tmp_path / "file"
    before = os.umask(0o027)
    try:
        if bits:
            path.touch()
            path.chmod(bits)
        files.write(path, "new")
    finally:
        os.umask(before)
    assert (mode(path), path.read_text()) == (bits or 0o640, "new")


@AS_ROOT
def test_the_owner_is_kept(tmp_path):
    path = tmp_path / "file"
    path.touch()
    os.chown(path, SOMEBODY, SOMEBODY + 1)
    path.chmod(0o4755)
    files.write(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid) == (SOMEBODY, SOMEBODY + 1)
    assert mode(path) == 0o4755


@pytest.mark.parametrize("target", ["there", "not yet", "folder/there", "folder/not yet"])
def test_links_are_followed(tmp_path, target):
    (tmp_path / "folder").mkdir()
    for there in ("there", "folder/there"):
        (tmp_path / there).touch(0o600)
    first = tmp_path / "first"
    second = tmp_path / "folder" / "second"
    first.symlink_to("folder/second")
    second.symlink_to(tmp_path / target)
    files.check_writable(first)
    files.write(first, "new")
    assert first.is_symlink() and second.is_symlink()
    assert (tmp_path / target).read_text() == "new"
    assert mode(tmp_path / target) == 0o600 or "not yet" in target


def test_a_device_is_written_to(tmp_path):
    path = tmp_path / "null"
    try:
        os.mknod(path, 0o644 | stat.S_IFCHR, os.makedev(1, 3))
        path.open("w").close()
    except PermissionError:
        pytest.skip("may not make a device")
    files.check_writable(path)
    files.write(path, "text")
    assert path.is_char_device()
    with pytest.raises(OSError, match="No space left"):
        files.write(Path("/dev/full"), "text")


def test_a_fifo_is_written_to(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    files.check_writable(path)  # nobody reads yet
    writer = Thread(target=files.write, args=(path, "text" * 100_000))
    writer.start()
    assert path.read_text() == "text" * 100_000
    writer.join()
    assert path.is_fifo()
    reader, pipe = os.pipe()  # as a shell's >(command) gives
    files.check_writable(Path(f"/dev/fd/{pipe}"))
    files.write(Path(f"/dev/fd/{pipe}"), "text")
    os.close(pipe)
    assert os.fdopen(reader).read() == "text"


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr", "out"])
def test_a_standard_stream_is_appended_to(tmp_path, name):
    stream = "stderr" if name == "/dev/stderr" else "stdout"
    code = f"print('before', file=sys.{stream}, flush=True); files.write(files.Path({name!r}), 'x')"
    with (tmp_path / "out").open("w") as out:
        child(code, cwd=tmp_path, **{stream: out})
    assert (tmp_path / "out").read_text() == "before\nx"
    reader, writer = socket.socketpair()  # which no path can open
    child(code.replace("'out'", "'/dev/stdout'"), cwd=tmp_path, **{stream: writer})
    writer.close()
    assert reader.makefile().read() == "before\nx"


def test_a_full_disk_leaves_the_old_file(tmp_path):
    with mounted("-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path):
        path = tmp_path / "file"
        path.write_text("old")
        (tmp_path / "large").write_bytes(bytes(50_000))
        for name in ("file", "new"):
            files.check_writable(tmp_path / name)
            with pytest.raises(OSError, match="No space left"):
                files.write(tmp_path / name, "x" * 20_000)
        assert path.read_text() == "old"
        assert names(tmp_path) == ["file", "large"]


def test_a_mounted_file_is_refused_early(tmp_path):
    """Containers may have single files of their host in this way. No file can be renamed to it."""
    outside = tmp_path / "outside"
    inside = tmp_path / "in side"
    outside.write_text("old")
    inside.touch()
    with mounted("--bind", outside, inside):
        assert refused(inside) == "EBUSY"
        with pytest.raises(OSError, match="busy"):
            files.write(inside, "new")
        files.check_writable(outside)
    assert outside.read_text() == "old"
    assert names(tmp_path) == ["in side", "outside"]


@AS_ROOT
@pytest.mark.parametrize("bits", [0o755, 0o1777])
def test_a_file_that_the_folder_does_not_let_us_replace_is_refused_and_unchanged(open_path, bits):
    """The folder belongs to root. With mode 1777 another user may make files there."""
    for name in ("free", "bound"):
        (open_path / name).write_text("old")
    (open_path / "free").chmod(0o666)
    open_path.chmod(bits)
    code = f"""
os.setgroups([])
os.setgid({SOMEBODY})
os.setuid({SOMEBODY})
for name in ("free", "bound", "new"):
    for call in (lambda path: files.write(path, "new"), files.check_writable):
        try:
            call(files.Path(name))
        except PermissionError:
            continue
        assert (name, {bits}) == ("new", 0o1777), name
"""
    child(code, cwd=open_path)
    made = ["new"] if bits == 0o1777 else []
    assert names(open_path) == ["bound", "free", *made]
    assert {(open_path / name).read_text() for name in ("bound", "free")} == {"old"}


def refused(path: Path) -> str:
    """Return the name of the error with which a path is refused."""
    with pytest.raises(OSError) as raised:
        files.check_writable(path)
    return errno.errorcode[raised.value.errno]


def test_paths_that_cannot_be_written_are_refused_early(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    Path("nowhere").symlink_to("no/folder")
    got = [refused(Path(p)) for p in (".", "no/file", "nowhere", "file/x", "loop", "x" * 999)]
    assert got == ["EISDIR", "ENOENT", "ENOENT", "ENOTDIR", "ELOOP", "ENAMETOOLONG"]
    Path("disk").mkdir()
    with mounted("-t", "tmpfs", "-o", "ro", "tmpfs", "disk"):
        assert refused(Path("disk/file")) == "EACCES"


def test_a_writer_that_is_killed_leaves_the_old_or_the_new_text(tmp_path):
    path = tmp_path / "file"
    texts = ["a" * 300_000, "b" * 400_000]
    path.write_text(texts[0])
    loop = "from referee.report import files\nwhile True:\n    "
    loop += "; ".join(f"files.write(files.Path({str(path)!r}), '{t[0]}' * {len(t)})" for t in texts)
    for _ in range(10):
        writer = subprocess.Popen([sys.executable, "-c", loop], cwd=ROOT)
        before = path.stat().st_ino
        while path.stat().st_ino == before:  # until it is replaced
            assert writer.poll() is None
            sleep(0.001)
        sleep(0.01)  # some writes later, at any point of one
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert path.read_text() in texts


def test_a_file_is_replaced_on_a_file_system_without_modes(tmp_path, monkeypatch):
    """There chmod fails."""

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = tmp_path / "results.json"
    path.write_text("old")
    path.chmod(0o640)
    monkeypatch.setattr(os, "fchmod", refuse)
    files.write(path, "new")
    assert path.read_text() == "new"
    assert mode(path) == 0o640
