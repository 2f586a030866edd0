"""Tiny models of the kinds that the demo has none of: embedders, rerankers, speech.

Served alike by the stand-in and, but for speech, by real oMLX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from omlx_admission.surfaces.demo.tinymodels import (
    fresh,
    make_text_model,
    write_json,
    write_tokenizer,
    write_weights,
)

__all__ = ["make_audio_model", "make_embedder", "make_reranker", "make_text_model"]


def make_embedder(
    directory: Path,
    *,
    name: str,
    counted_bytes: int | None = None,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
) -> Path:
    """Write a BERT-type embedding model to ``directory/name`` and return that folder.

    Vectors have ``hidden`` dimensions. Texts of up to 2000 bytes are safe.
    """
    folder = fresh(directory, name)
    vocab = write_tokenizer(folder, ("<|pad|>",), chat=False)
    config = _bert_config(hidden, layers, vocab)
    write_json(folder / "config.json", config)
    write_weights(folder, _bert_weights(config, seed), counted_bytes)
    return folder


def make_reranker(
    directory: Path,
    *,
    name: str,
    counted_bytes: int | None = None,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
) -> Path:
    """Write an XLM-RoBERTa-type reranker to ``directory/name`` and return that folder.

    Its scores are as good as random, the same for the same texts.
    """
    folder = fresh(directory, name)
    vocab = write_tokenizer(folder, ("<|pad|>",), chat=False)
    config = {
        **_bert_config(hidden, layers, vocab),
        "architectures": ["XLMRobertaForSequenceClassification"],
        "model_type": "xlm-roberta",
        "num_labels": 1,
    }
    write_json(folder / "config.json", config)
    weights = _bert_weights(config, seed)
    # In the place of the pooler: its weights, and one row for the score.
    for part in ("weight", "bias"):
        weights[f"classifier.dense.{part}"] = weights.pop(f"pooler.dense.{part}")
    weights["classifier.out_proj.weight"] = weights["classifier.dense.weight"][:1]
    weights["classifier.out_proj.bias"] = mx.zeros((1,))
    # oMLX reads every file of a reranker and drops tensors of this name only.
    write_weights(folder, weights, counted_bytes, padding="position_ids")
    return folder


#: What makes a folder a model of one audio kind: ``model_type`` and architecture.
_AUDIO = {
    "stt": ("whisper", "WhisperForConditionalGeneration"),
    "tts": ("kokoro", "KokoroForConditionalGeneration"),
    "sts": ("deepfilternet", "DeepFilterNetModel"),
}


def make_audio_model(
    directory: Path, *, name: str, kind: str, counted_bytes: int | None = None, seed: int = 0
) -> Path:
    """Write a folder that is found as an audio model (``stt``, ``tts`` or ``sts``).

    The stand-in serves it. A real oMLX finds and counts it, and fails to load it: its
    weights are those of an encoder.
    """
    folder = fresh(directory, name)
    vocab = write_tokenizer(folder, ("<|pad|>",), chat=False)
    model_type, architecture = _AUDIO[kind]
    config = _bert_config(64, 2, vocab) | {
        "architectures": [architecture],
        "model_type": model_type,
    }
    write_json(folder / "config.json", config)
    write_weights(folder, _bert_weights(config, seed), counted_bytes)
    return folder


def _bert_config(hidden: int, layers: int, vocab: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": hidden * 2,
        "num_attention_heads": hidden // 32,
        "max_position_embeddings": 2048,
        "type_vocab_size": 1,
        "vocab_size": len(vocab),
        "layer_norm_eps": 1e-5,
        "pad_token_id": vocab["<|pad|>"],
    }


def _bert_weights(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    key = mx.random.key(seed)

    def random(*shape: int) -> mx.array:
        nonlocal key
        key, use = mx.random.split(key)
        values: mx.array = mx.random.normal(shape, key=use) * (shape[-1] ** -0.5)
        return values

    weights: dict[str, mx.array] = {}

    def linear(at: str, outputs: int, inputs: int) -> None:
        weights[f"{at}.weight"] = random(outputs, inputs)
        weights[f"{at}.bias"] = mx.zeros((outputs,))

    def norm(at: str) -> None:
        weights[f"{at}.weight"] = mx.ones((hidden,))
        weights[f"{at}.bias"] = mx.zeros((hidden,))

    for table, rows in (
        ("word", config["vocab_size"]),
        ("position", config["max_position_embeddings"]),
        ("token_type", config["type_vocab_size"]),
    ):
        weights[f"embeddings.{table}_embeddings.weight"] = random(rows, hidden)
    norm("embeddings.LayerNorm")
    for index in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            linear(f"{at}.attention.self.{part}", hidden, hidden)
        linear(f"{at}.attention.output.dense", hidden, hidden)
        norm(f"{at}.attention.output.LayerNorm")
        linear(f"{at}.intermediate.dense", wide, hidden)
        linear(f"{at}.output.dense", hidden, wide)
        norm(f"{at}.output.LayerNorm")
    linear("pooler.dense", hidden, hidden)
    return weights
