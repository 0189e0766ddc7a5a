"""Putting files into a folder: copies, clones and links, hashed and flushed to the disk."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from transformer2.conversion.checkpoints import BUFFER_SIZE, file_sha256, tell_bytes
from transformer2.errors import MachineError

Method = Literal["copy", "reflink", "link"]
WAYS = ("auto", "link", "reflink", "copy")
COPY_INSTEAD = "use materialize='copy', or --materialize copy on the command line"
FICLONE = 0x40049409  # Linux: share the blocks of another file until one of the two changes


def choose_method(materialize: str, example: Path, folder: Path) -> Method:
    """How base shards get into `folder`: "auto" clones where the file system can, and copies elsewhere.

    Raises MachineError if what was asked for is impossible here.
    """
    if materialize in ("copy", "link"):
        return materialize
    probe = folder / ".clone-probe"
    try:
        clone(example, probe)
        return "reflink"
    except OSError:
        if materialize == "reflink":
            raise MachineError(
                f"The file system of {folder.parent} cannot clone files from {example.parent}; {COPY_INSTEAD}."
            ) from None
        return "copy"
    finally:
        probe.unlink(missing_ok=True)


def place(source: Path, target: Path, method: Method) -> str | None:
    """Put a file in place without changing the bytes of `source`; returns the SHA-256, None for a link.

    A link takes no time however large the file is, so its bytes are not read.
    """
    source = source.resolve()  # the Hub's cache consists of links
    if method == "link":
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
            raise MachineError(
                f"{source.name} cannot be hard-linked into {target.parent.parent} ({error.strerror}); {COPY_INSTEAD}."
            ) from None
        return None
    if method == "reflink":
        clone(source, target)
        return file_sha256(target)
    return copy(source, target)


def protect(file: Path) -> None:
    """Take the write permission from a hard-linked file, under all its names: a write would change all of them."""
    with contextlib.suppress(PermissionError):  # somebody else's file
        os.chmod(file, file.stat().st_mode & ~0o222)


def clone(source: Path, target: Path) -> None:
    """Copy-on-write clone. Raises OSError where the file system cannot."""
    try:
        from fcntl import ioctl
    except ImportError:
        raise OSError(errno.EOPNOTSUPP, "no clones on this system") from None
    with open(source, "rb") as reader, open(target, "wb") as writer:
        ioctl(writer.fileno(), FICLONE, reader.fileno())
        os.fsync(writer.fileno())


def copy(source: Path, target: Path) -> str:
    """Byte copy through a bounded buffer; returns the SHA-256 of what was written."""
    digest = hashlib.sha256()
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while chunk := reader.read(BUFFER_SIZE):
            digest.update(chunk)
            writer.write(chunk)
            tell_bytes(len(chunk))
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest()


def write_json(file: Path, value: Any) -> None:
    """Write and flush a JSON file, readable by people."""
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write and flush a text, to the byte."""
    with open(file, "w", encoding="utf-8", newline="") as writer:
        writer.write(text)
        writer.flush()
        os.fsync(writer.fileno())


def replace_json(file: Path, value: Any) -> None:
    """As `write_json`, over a file that exists: after a kill there is the old one or the new one."""
    new = file.with_name(f".{file.name}.new")
    write_json(new, value)
    os.replace(new, file)


def readable_as_usual(file: Path) -> None:
    """The permissions of a newly made file: safetensors makes its own readable for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(file, 0o666 & ~mask)


def flush(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems have no fsync for folders
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def require_space(folder: Path, num_bytes: int, can_link: bool = False) -> None:
    """Raise MachineError unless the file system of `folder` has room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        remedy = "free some space"
        if can_link:
            remedy += ", or use materialize='link' (--materialize link), which shares the source's weights"
        raise MachineError(f"{folder} has {_amount(free)} free and {_amount(num_bytes)} are needed; {remedy}.")


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes > 1e9 else f"{num_bytes / 1e6:,.0f} MB"
