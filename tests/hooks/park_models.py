"""Tiny models of other shapes than llama's, with random weights: other KV caches."""

from __future__ import annotations

import importlib
from typing import Any

#: Beside the size of the vocabulary; a window is shorter than an answer.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window": 16,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 1,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
        "head_dim": 32,
    },
}
SHAPES = sorted(_ARGUMENTS)


def make(shape: str, dtype: str, vocabulary: int) -> Any:
    """A model of ``shape``, the same at each call."""
    import mlx.core as mx
    from mlx.utils import tree_map

    module = importlib.import_module(f"mlx_lm.models.{shape}")
    mx.random.seed(5)
    args = module.ModelArgs.from_dict({**_ARGUMENTS[shape], "vocab_size": vocabulary})
    model = module.Model(args)
    kind = getattr(mx, dtype)
    # Larger than at the start of a training: the text does not repeat itself.
    model.update(tree_map(lambda a: (a * 3).astype(kind), model.parameters()))
    mx.eval(model.parameters())
    return model


class HalvedLinear:
    """Emulates a GPU: a product for many positions sums in another order than one for one.

    MLX on the CPU gives the same bits for both, so that nothing here could tell an answer
    that went on from one that was prefilled anew.
    """

    def __init__(self, monkeypatch: Any) -> None:
        import mlx.core as mx
        from mlx import nn

        stock = nn.Linear.__call__

        def call(linear: Any, x: Any) -> Any:
            if x.shape[-2] <= 1 or "bias" in linear:
                return stock(linear, x)
            half = x.shape[-1] // 2
            weight = linear.weight
            first = x[..., :half].astype(mx.float32) @ weight[:, :half].T.astype(mx.float32)
            second = x[..., half:].astype(mx.float32) @ weight[:, half:].T.astype(mx.float32)
            return (first + second).astype(x.dtype)

        monkeypatch.setattr(nn.Linear, "__call__", call)
