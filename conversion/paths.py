"""The one place where what the operating system says about a path becomes a sentence for the user.

Every public function that touches the disk is decorated with `plain_os_errors()`, so nothing below has to think of
paths that are too long, loops of symbolic links, folders where a file should be, or disks that are full.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from transformer2.errors import MachineError, UserError

# What a model keeps in files of these names is never in a folder of such a name.
FILE_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")
FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
BAD_PATH = (
    *(errno.EEXIST, errno.ENOTDIR, errno.ENOENT, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOTEMPTY, errno.EINVAL, errno.ENXIO, errno.ENODEV),
)


def user_path(path: str | Path) -> Path:
    """A path as a user gives it: "~" is their home. Raises UserError for no such home, and for a link to nothing."""
    if not str(path):
        raise UserError("A path is empty: name a file or folder.")
    with plain_os_errors():
        path = Path(path).expanduser()
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a symbolic link to nothing, or to itself; name another path.")
        return path


@contextlib.contextmanager
def plain_os_errors(folder: Path | None = None) -> Iterator[None]:
    """Turn errors of the operating system into UserError (bad path) or MachineError (disk), one sentence each.

    folder: what to name where the system names nothing. The original error stays as the cause.
    """
    try:
        yield
    except BrokenPipeError:  # whoever read our output has gone: nothing to explain, and nobody to explain it to
        raise
    except OSError as error:
        if error.errno is None:  # from a library, about something else
            raise
        raise sentence(error.errno, error.filename or folder) from error
    except RuntimeError as error:
        if loop := re.match(r"Symlink loop from '(.*)'", str(error)):  # how pathlib says it up to Python 3.12
            raise sentence(errno.ELOOP, loop[1]) from error
        if "home directory" in str(error):
            raise UserError("A path starts with '~', and there is no such home folder; write it out.") from error
        raise
    except Exception as error:  # safetensors has an exception type of its own
        if type(error).__name__ == "SafetensorError" and (code := re.search(r"\(os error (\d+)\)", str(error))):
            raise sentence(int(code[1]), folder) from error
        raise


def sentence(code: int, path: str | bytes | Path | None) -> UserError:
    """The error to raise for the system's error number `code` at `path`."""
    reason, path = os.strerror(code), os.fsdecode(path) if path is not None else None
    path = re.sub(r"\.([^/]+)\.partial-[0-9a-f]{8}(?=/|$)", r"\1", path or "") or None  # what the user called it
    if code in FULL:
        where = f" of {path}" if path else ""
        return MachineError(f"The disk{where} is full ({reason}); free some space and run it again.")
    where = f"{path} " if path else "A file or folder "
    if code in FORBIDDEN:
        return UserError(f"{where}cannot be accessed ({reason}); check its permissions, or name another path.")
    if code in BAD_PATH:
        return UserError(f"{where}cannot be used ({reason}); check the path, or name another one.")
    return MachineError(f"{where}cannot be used ({reason}): this machine's disk or limits failed, so try again.")


def refuse_misplaced(folder: Path) -> None:
    """Raise UserError where a model folder has a folder, or a link to nothing, in place of a file."""
    for entry in sorted(folder.iterdir()):
        if entry.suffix not in FILE_SUFFIXES:
            continue
        if entry.is_dir():
            raise UserError(f"{entry} is a folder, where a model has a file; move it away, or get the model again.")
        if entry.is_symlink() and not entry.exists():
            raise UserError(f"{entry} is a symbolic link to nothing; remove it, or get the model again.")


@contextlib.contextmanager
def parents_for(output: Path) -> Iterator[None]:
    """Make the folders above `output`, and remove those again, if empty, where what follows fails."""
    made = [parent for parent in output.parents if not parent.exists()]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):  # something else is in it by now
                parent.rmdir()
        raise


def check_seed(seed: int, name: str = "The seed") -> None:
    """Raise UserError for a seed that one of the generators (NumPy's takes 32 bits) would refuse."""
    if not 0 <= seed < 2**32:
        raise UserError(f"{name} must lie between 0 and 2^32 - 1, got {seed}.")
