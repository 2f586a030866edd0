"""Tiny random-weight text models, made in well under a second each.

They are served alike by the stand-in and by real oMLX (0.5.0 to 0.6.3rc2 were
tried). Nothing is downloaded and no trained weights are involved.

A text model never ends by itself: one coordinate of the residual stream is a
constant that no layer touches, and the output head uses it to push every token
but the small letters out of reach. So ``max_tokens=N`` yields exactly
N tokens, each one character long, and a stream's length in seconds is
``N / decode speed``.

oMLX counts a model as 1.05 times the sum of its ``*.safetensors`` file sizes.
``counted_bytes`` sets that sum (before the factor) by adding sparse files that
take no disk and that no loader reads into memory.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx

#: Most bytes of one padding file: MLX shapes are 32-bit.
_PAD_FILE_LIMIT = 1_900_000_000
_TEXT_SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] if message['role'] in "
    "['system', 'user', 'assistant'] else 'user' }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: What a text model may say; everything else is suppressed by the head. No space:
#: servers strip those at the ends of an answer.
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_STEADY = 4.0


def make_text_model(
    directory: Path,
    *,
    name: str,
    counted_bytes: int | None = None,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
) -> Path:
    """Write a llama-type chat model to ``directory/name`` and return that folder.

    ``counted_bytes`` is the sum of weight file sizes to show (None: no padding).
    ``hidden`` (a multiple of 32) and ``layers`` set the cost of a token: the
    default decodes a few hundred to a thousand tokens per second on one CPU
    core; ``hidden=512, layers=8`` a few dozen.
    """
    folder = fresh(directory, name)
    vocab = write_tokenizer(folder, _TEXT_SPECIALS, chat=True)
    heads = hidden // 32
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": hidden * 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(vocab),
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": vocab["<|begin|>"],
        "eos_token_id": vocab["<|end|>"],
        "pad_token_id": vocab["<|pad|>"],
    }
    write_json(folder / "config.json", config)
    write_weights(folder, _llama_weights(hidden, layers, vocab, seed), counted_bytes)
    return folder


def _llama_weights(
    hidden: int, layers: int, vocab: dict[str, int], seed: int
) -> dict[str, mx.array]:
    key = mx.random.key(seed)

    def random(*shape: int) -> mx.array:
        nonlocal key
        key, use = mx.random.split(key)
        values: mx.array = mx.random.normal(shape, key=use) * (shape[-1] ** -0.5)
        return values

    def into_residual(*shape: int) -> mx.array:
        # Row 0 is zero: no layer may disturb the steady coordinate.
        weight = random(*shape)
        weight[0] = 0
        return weight

    embed = random(len(vocab), hidden)
    embed[:, 0] = _STEADY
    weights = {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": mx.ones((hidden,)),
        "lm_head.weight": _head(hidden, vocab, random(len(vocab), hidden)),
    }
    for index in range(layers):
        at = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{norm}.weight"] = mx.ones((hidden,))
        for projection in ("q_proj", "k_proj", "v_proj"):
            weights[f"{at}self_attn.{projection}.weight"] = random(hidden, hidden)
        weights[f"{at}self_attn.o_proj.weight"] = into_residual(hidden, hidden)
        weights[f"{at}mlp.gate_proj.weight"] = random(hidden * 2, hidden)
        weights[f"{at}mlp.up_proj.weight"] = random(hidden * 2, hidden)
        weights[f"{at}mlp.down_proj.weight"] = into_residual(hidden, hidden * 2)
    return weights


def _head(hidden: int, vocab: dict[str, int], head: mx.array) -> mx.array:
    head[:, 0] = -200.0
    for character in _ALPHABET:
        head[vocab[character], 0] = 0.0
    return head


def write_tokenizer(folder: Path, specials: tuple[str, ...], *, chat: bool) -> dict[str, int]:
    """One token per byte, plus ``specials``; returns token text to id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 131072 if chat else 2048,
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat:
        config |= {
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "chat_template": _TEMPLATE,
        }
    write_json(folder / "tokenizer_config.json", config)
    return vocab


def write_weights(
    folder: Path,
    weights: dict[str, mx.array],
    counted_bytes: int | None,
    padding: str = "pad",
) -> None:
    """The weights, and tensors named ``padding`` up to ``counted_bytes``."""
    mx.eval(list(weights.values()))
    path = folder / "model.safetensors"
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    if counted_bytes is None:
        return
    missing = counted_bytes - path.stat().st_size
    if missing < 0:
        raise ValueError(
            f"counted_bytes={counted_bytes} is less than the weights of {folder.name} "
            f"({path.stat().st_size} bytes)"
        )
    index = 0
    while missing > 0:
        # A file below the size of its own header cannot be made: leave that off.
        size = min(missing, _PAD_FILE_LIMIT)
        if size > 256:
            _write_pad(folder / f"pad{index or ''}.safetensors", size, padding)
        missing -= size
        index += 1


def _write_pad(path: Path, size: int, tensor: str) -> None:
    """A valid safetensors file of exactly ``size`` bytes holding one sparse tensor.

    The name must not match ``model*.safetensors``, which is what mlx-lm loads.
    oMLX opens every ``*.safetensors`` of an embedder, but lazily: only headers
    are read, and an unknown tensor is dropped before anything evaluates it.
    """
    room = 248
    count = size - 8 - room
    header = json.dumps(
        {tensor: {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}
    ).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", room))
        file.write(header.ljust(room))
        file.truncate(size)


def fresh(directory: Path, name: str) -> Path:
    """The folder of a model, without the weights of an earlier one."""
    folder = Path(directory) / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    return folder


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A file as people can read it."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
