"""What the functions of this package return: dictionaries that `--json` prints as they are."""

from typing import Any, TypedDict


class Check(TypedDict, total=False):
    """One check of a verification. "figures" are the numbers behind it, where there are some."""

    level: str
    name: str
    passed: bool
    detail: str
    figures: dict[str, Any]


class Verification(TypedDict):
    """What `verify` returns and writes to verification.json. "failures" is empty if "passed"."""

    level: str
    passed: bool
    failures: list[str]
    notes: list[str]
    checks: list[Check]
    seconds: float
    versions: dict[str, str]


class Plan(TypedDict, total=False):
    """What `plan` returns; without "possible", only "refusal" and "source" are there.

    Sizes are in bytes, memory is the peak beyond what imports take. "cache" holds bytes of keys and values per token,
    and those that the new operators keep per sequence. "expected_level" is the highest verification level that the
    conversion can pass, "expected_start" in words what the converted model computes before any training.
    """

    possible: bool
    refusal: str | None
    source: dict[str, Any]
    family: str
    layers: int
    dtype: str
    shards: int
    residual: dict[str, Any]
    local_mixer: dict[str, Any]
    base_parameters: int
    base_bytes: int
    new_parameters: int
    new_parameters_by_layer: list[int]
    new_parameters_elsewhere: int
    new_bytes: int
    bytes_to_write: dict[str, int]
    memory: dict[str, int]
    extra_flops_per_token: int
    extra_flops_share: float
    cache: dict[str, int]
    expected_level: str
    expected_start: str
    tie_word_embeddings: bool
    warnings: list[str]


class Conversion(TypedDict, total=False):
    """What `convert` returns. "dequantised" is there for GGUF sources."""

    output: str
    source: dict[str, Any]
    residual: dict[str, Any]
    local_mixer: dict[str, Any]
    materialized: str
    base_parameters: int
    new_parameters: int
    new_tensors: int
    new_bytes: int
    tie_word_embeddings: bool
    files: list[str]
    resumed_files: list[str]
    warnings: list[str]
    verification: Verification
    dequantised: str


class Stripped(TypedDict, total=False):
    """What `strip` returns. "identical": whether every file has the bytes of the original checkpoint."""

    output: str
    identical: bool
    tensors: int
    files: list[str]
    warnings: list[str]
    logits: dict[str, Any]
