"""Where a source model comes from: a folder, a GGUF file, or a model on the Hub."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer2.conversion.paths import user_path
from transformer2.errors import UserError

# Weights in other formats, pickles, code and leftovers of training: never downloaded, never carried over.
UNWANTED_SUFFIXES = (
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".npz", ".npy", ".ot"),
    *(".onnx", ".onnx_data", ".tflite", ".mlmodel", ".gguf", ".ggml", ".py", ".pyc"),
)
IGNORED = [f"*{suffix}" for suffix in UNWANTED_SUFFIXES] + ["consolidated*", "original/*"]


@dataclass(frozen=True)
class Source:
    """A model folder, and what may be said about its origin in public: never a path of this machine."""

    folder: Path
    name: str
    commit: str | None = None
    gguf: dict[str, Any] | None = None


def resolve_source(source: str | Path, output: Path, revision: str | None = None) -> Source:
    """Find the model folder behind `source`; GGUF files are dequantised into a folder next to `output` first.

    Raises UserError, in one sentence, if there is no such model or it cannot be reached.
    """
    path = user_path(source)
    if path.is_file() and path.suffix == ".gguf":
        from transformer2.conversion.gguf_files import dequantise

        _refuse_revision(revision)
        folder, facts = dequantise(path, output)
        return Source(folder, path.name, gguf=facts)
    return local_source(source, revision) or _download(str(source), revision)


def local_source(source: str | Path, revision: str | None = None) -> Source | None:
    """The folder that `source` names, or None if it is the name of a model on the Hub. Raises UserError for others."""
    path = user_path(source)
    if path.is_file():
        raise UserError(f"{source} is a file: give the folder of the model, or a .gguf file.")
    if path.is_dir():
        _refuse_revision(revision)
        return Source(path, path.resolve().name)
    if path.is_absolute() or str(source).startswith((".", "~")) or str(source).count("/") > 1:
        raise UserError(f"There is no folder {source}.")
    return None


def _refuse_revision(revision: str | None) -> None:
    if revision is not None:
        raise UserError(
            "A revision (--revision) picks a commit of a model on the Hub; a source on disk has none, so drop it."
        )


def _download(repo_id: str, revision: str | None) -> Source:
    from huggingface_hub import snapshot_download

    with hub_errors(repo_id, revision):
        folder = Path(snapshot_download(repo_id, revision=revision, ignore_patterns=IGNORED))
    return Source(folder, repo_id, commit=folder.name)


@contextlib.contextmanager
def hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Whatever keeps a model of the Hub from us becomes a UserError, one sentence with the remedy."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError:
        raise UserError(f"{repo_id!r} is neither a folder nor the name of a model on the Hub.") from None
    except GatedRepoError:
        raise UserError(
            f"{repo_id} is gated: accept its licence on its page and log in with `hf auth login`."
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"{repo_id} has no revision {revision!r}; see the branches and tags on its page.") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"There is no folder and no model on the Hub called {repo_id!r}; check the spelling."
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a full disk, for example
        raise UserError(
            f"There is no folder {repo_id!r}, no model of that name in the cache, and the Hub cannot be reached; "
            "go online, or give a folder."
        ) from None
