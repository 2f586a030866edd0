"""One sequence of tokens out of an mlx-lm model.

No counterpart in oMLX, which uses mlx-lm's batch generator for this.
"""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .request import Request, RequestOutput


class Sequence:
    """Prompt, KV cache and the token in flight; lives on the engine's thread."""

    def __init__(self, model: Any, tokenizer: Any, request: Request, stream: Any):
        self._model = model
        self._request = request
        self._stream = stream
        self._cache = make_prompt_cache(model)
        self._detokenizer = tokenizer.detokenizer
        self._eos = set(tokenizer.eos_token_ids)
        self._tokens = request.output_token_ids
        self._text = ""
        self._in_flight: mx.array | None = None
        self._first_token_at: float | None = None
        seed = request.sampling_params.seed
        self._seed = time.monotonic_ns() if seed is None else seed

    def prefill(self, chunk: int) -> None:
        """Run the prompt, ``chunk`` tokens at a time, and submit the first token."""
        tokens = self._request.prompt_token_ids or [0]
        with mx.stream(self._stream):
            for start in range(0, len(tokens) - 1, chunk):
                part = tokens[start : min(start + chunk, len(tokens) - 1)]
                self._model(mx.array([part]), cache=self._cache)
                mx.eval([layer.state for layer in self._cache])
        self._submit(mx.array([tokens[-1]]))

    def advance(self) -> RequestOutput:
        """The token in flight, with the one after it submitted first."""
        token = self._in_flight
        assert token is not None
        self._submit(token)
        value = int(token.item())
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()
        stopped = value in self._eos
        new_text = "" if stopped else self._add(value)
        cut = self._stop_position()
        if cut is not None:
            new_text = new_text[: max(0, cut - len(self._text) + len(new_text))]
            self._text, stopped = self._text[:cut], True
        length = len(self._tokens) >= self._request.sampling_params.max_tokens
        if length and not stopped:
            # Bytes of an unfinished character are still held back.
            self._detokenizer.finalize()
            rest = str(self._detokenizer.last_segment)
            self._text += rest
            new_text += rest
        now = time.perf_counter()
        return RequestOutput(
            request_id=self._request.request_id,
            new_token_ids=[value],
            new_text=new_text,
            output_token_ids=list(self._tokens) if stopped or length else [],
            output_text=self._text,
            finished=stopped or length,
            finish_reason="stop" if stopped else "length" if length else None,
            prompt_tokens=self._request.num_prompt_tokens,
            completion_tokens=len(self._tokens),
            generated_at=now,
            generated_until=now,
            first_token_at=self._first_token_at,
        )

    def bytes_per_token(self) -> int:
        """KV bytes of one token, from this sequence's cache."""
        offset = max(1, int(self._cache[0].offset))
        arrays = [a for layer in self._cache for a in layer.state if isinstance(a, mx.array)]
        return sum(int(array.nbytes) for array in arrays) // offset

    def _submit(self, token: mx.array) -> None:
        params = self._request.sampling_params
        with mx.stream(self._stream):
            logits = self._model(token[None], cache=self._cache)[:, -1, :]
            if params.temperature <= 0:
                following = mx.argmax(logits, axis=-1)
            else:
                # A key per token: the global random state belongs to one thread.
                self._seed = (self._seed + 1) % (1 << 62)
                following = mx.random.categorical(
                    logits / params.temperature, key=mx.random.key(self._seed)
                )
            mx.async_eval(following)
        self._in_flight = following

    def _add(self, token: int) -> str:
        self._tokens.append(token)
        self._detokenizer.add_token(token)
        segment = str(self._detokenizer.last_segment)
        self._text += segment
        return segment

    def _stop_position(self) -> int | None:
        found = [self._text.find(stop) for stop in self._request.sampling_params.stop or []]
        hits = [position for position in found if position >= 0]
        return min(hits) if hits else None
