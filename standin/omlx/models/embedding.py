"""A BERT-type encoder in plain MLX, mean-pooled to unit vectors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx


@dataclass
class EmbeddingOutput:
    """One vector per text."""

    embeddings: list[list[float]]
    total_tokens: int
    dimensions: int = 0


class MLXEmbeddingModel:
    """Weights and tokenizer of one embedding model."""

    def __init__(self, model_name: str, trust_remote_code: bool = False):
        self.model_name = model_name
        self._config: dict[str, Any] = {}
        self._weights: dict[str, mx.array] = {}
        self._tokenizer: Any = None

    @property
    def hidden_size(self) -> int | None:
        return self._config.get("hidden_size")

    def load(self) -> None:
        from tokenizers import Tokenizer

        folder = Path(self.model_name)
        self._config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._weights = {}
        for file in sorted(folder.glob("model*.safetensors")):
            self._weights.update(mx.load(str(file)))
        mx.eval(list(self._weights.values()))

    def close(self) -> None:
        self._weights = {}
        mx.synchronize()
        mx.clear_cache()

    def embed(
        self,
        inputs: list[str],
        max_length: int | None = None,
        padding: bool = True,
        truncation: bool = True,
    ) -> EmbeddingOutput:
        """Vectors of ``inputs``; longer texts are cut at ``max_length`` tokens."""
        limit = max_length or self._config["max_position_embeddings"] - 1
        ids = [self._tokenizer.encode(text).ids[:limit] or [0] for text in inputs]
        longest = max(len(row) for row in ids)
        tokens = mx.array([row + [0] * (longest - len(row)) for row in ids])
        mask = mx.array([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in ids])
        hidden = self._encode(tokens, mask)
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        unit = pooled / mx.linalg.norm(pooled, axis=-1, keepdims=True)
        mx.eval(unit)
        vectors: Any = unit.tolist()
        return EmbeddingOutput(vectors, sum(len(row) for row in ids), len(vectors[0]))

    def _encode(self, tokens: mx.array, mask: mx.array) -> mx.array:
        at = self._weights
        x = at["embeddings.word_embeddings.weight"][tokens]
        # Positions count from 1: 0 belongs to padding.
        places = mx.arange(1, tokens.shape[1] + 1)
        x = x + at["embeddings.position_embeddings.weight"][places]
        x = self._norm(x + at["embeddings.token_type_embeddings.weight"][0], "embeddings")
        for index in range(self._config["num_hidden_layers"]):
            name = f"encoder.layer.{index}"
            attended = self._attend(x, mask, f"{name}.attention")
            x = self._norm(x + attended, f"{name}.attention.output")
            wide = self._linear(x, f"{name}.intermediate.dense")
            wide = wide * (1 + mx.erf(wide / 2**0.5)) / 2
            x = self._norm(x + self._linear(wide, f"{name}.output.dense"), f"{name}.output")
        return x

    def _attend(self, x: mx.array, mask: mx.array, name: str) -> mx.array:
        rows, length, width = x.shape
        heads = self._config["num_attention_heads"]

        def split(part: str) -> mx.array:
            y = self._linear(x, f"{name}.self.{part}")
            return y.reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)

        bias = ((1.0 - mask) * -1e4)[:, None, None, :]
        y = mx.fast.scaled_dot_product_attention(
            split("query"),
            split("key"),
            split("value"),
            scale=(width // heads) ** -0.5,
            mask=bias,
        )
        joined = y.transpose(0, 2, 1, 3).reshape(rows, length, width)
        return self._linear(joined, f"{name}.output.dense")

    def _linear(self, x: mx.array, name: str) -> mx.array:
        return x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, x: mx.array, name: str) -> mx.array:
        weight = self._weights[f"{name}.LayerNorm.weight"]
        bias = self._weights[f"{name}.LayerNorm.bias"]
        return mx.fast.layer_norm(x, weight, bias, self._config["layer_norm_eps"])
