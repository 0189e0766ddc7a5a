"""What several test files share: tiny models, and no network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from helpers import tiny_llama

torch.set_num_threads(1)


@pytest.fixture
def llama_folder(tmp_path):
    """A tiny Llama checkpoint on disk."""
    folder = tmp_path / "llama"
    tiny_llama().save_pretrained(folder)
    return folder
