"""A model on the Hub as a checkpoint without its weights: config and safetensors headers, by range requests."""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from transformer2.conversion.checkpoints import Checkpoint, TensorEntry, open_checkpoint, read_json
from transformer2.conversion.sources import IGNORED, Source, hub_errors
from transformer2.errors import UserError

SAMPLE = 64 * 2**10  # bytes by which two tensors of the same shape are told apart
SMALL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json")


@dataclass(frozen=True)
class RemoteTensor(TensorEntry):
    """A tensor on the Hub. `start` and `end` count from the end of the header; `file` is a name in the repository."""

    repo_id: str = ""
    commit: str = ""

    def sha256(self) -> str:
        """Hash of the first 64 KiB: enough to tell a copy of the embeddings from a head of its own."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        url = hf_hub_url(self.repo_id, PurePosixPath(self.file).as_posix(), revision=self.commit)

        def fetch(start: int, end: int) -> bytes:
            headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
            response = get_session().get(url, headers=headers, follow_redirects=True)
            hf_raise_for_status(response)
            return response.content[: end - start]

        (length,) = struct.unpack("<Q", fetch(0, 8))
        start = 8 + length + self.start
        return hashlib.sha256(fetch(start, start + min(SAMPLE, self.end - self.start))).hexdigest()


@dataclass(frozen=True)
class RemoteCheckpoint(Checkpoint):
    """A checkpoint whose weights stay on the Hub. `folder` holds its small files."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.end - entry.start for entry in self.tensors.values())


def open_remote(repo_id: str, revision: str | None = None) -> tuple[Source, Checkpoint]:
    """The headers of a model on the Hub, at the commit that `revision` is now. Offline: those of the local cache.

    Raises UserError, in one sentence, if there is no such model, it cannot be reached, or has no safetensors.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import NotASafetensorsRepoError

    with hub_errors(repo_id, revision):
        if constants.HF_HUB_OFFLINE:
            folder = Path(snapshot_download(repo_id, revision=revision, ignore_patterns=IGNORED))
            return Source(folder, repo_id, commit=folder.name), open_checkpoint(folder)
        info = HfApi().model_info(repo_id, revision=revision)
        names = {file.rfilename for file in info.siblings or ()}
        if "config.json" not in names:
            raise UserError(f"{repo_id} has no config.json, so it is not a model of transformers.")
        files = [hf_hub_download(repo_id, name, revision=info.sha) for name in SMALL_FILES if name in names]
        try:
            headers = HfApi().get_safetensors_metadata(repo_id, revision=info.sha)
        except NotASafetensorsRepoError:
            raise UserError(
                f"{repo_id} has no safetensors weights; download it and convert them with transformers first "
                "(AutoModelForCausalLM.from_pretrained, then save_pretrained)."
            ) from None
    tensors = {
        name: RemoteTensor(Path(file), info_.dtype, tuple(info_.shape), *info_.data_offsets, repo_id, info.sha)
        for file, header in headers.files_metadata.items()
        for name, info_ in header.tensors.items()
    }
    shards = tuple(Path(name) for name in sorted(headers.files_metadata))
    folder = Path(files[0]).parent
    return Source(folder, repo_id, commit=info.sha), RemoteCheckpoint(
        folder, read_json(folder / "config.json"), shards, tensors
    )
