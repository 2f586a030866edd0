"""The model makers: sizes as counted, weights as seeded, disk as good as unused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from standin.tinymodels import (
    make_embedder,
    make_reranker,
    make_text_model,
)


def counted(folder: Path) -> int:
    """What oMLX sums up."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("size", [2_000_000, 1_800_000_000, 5_000_000_000])
@pytest.mark.parametrize("make", [make_text_model, make_embedder, make_reranker])
def test_counted_size_is_exact_and_sparse(tmp_path: Path, make: object, size: int) -> None:
    folder = make(tmp_path, name="m", counted_bytes=size)  # type: ignore[operator]
    assert counted(folder) == size
    on_disk = sum(file.stat().st_blocks * 512 for file in folder.iterdir())
    assert on_disk < 4_000_000
    # mlx-lm loads ``model*.safetensors`` only.
    assert [file.name for file in folder.glob("model*.safetensors")] == ["model.safetensors"]
    assert all(file.stat().st_size < 2**31 for file in folder.iterdir())


def test_padding_is_a_valid_file(tmp_path: Path) -> None:
    folder = make_text_model(tmp_path, name="m", counted_bytes=2_000_000)
    raw = (folder / "pad.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    tensor = json.loads(raw[8 : 8 + length])["pad"]
    assert tensor["data_offsets"] == [0, len(raw) - 8 - length]
    assert tensor["shape"] == [len(raw) - 8 - length]


def test_no_size_means_no_padding(tmp_path: Path) -> None:
    folder = make_text_model(tmp_path, name="m")
    assert not (folder / "pad.safetensors").exists()


def test_size_below_the_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="less than the weights"):
        make_text_model(tmp_path, name="m", counted_bytes=1000)


def test_weights_follow_the_seed(tmp_path: Path) -> None:
    weights = [
        (make_text_model(tmp_path, name=name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("one", 1), ("again", 1), ("two", 2))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_making_again_replaces_the_padding(tmp_path: Path) -> None:
    make_text_model(tmp_path, name="m", counted_bytes=5_000_000_000)
    assert counted(make_text_model(tmp_path, name="m", counted_bytes=2_000_000)) == 2_000_000
