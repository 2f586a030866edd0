"""A reranker out of an embedding model: the score is the cosine of two vectors."""

from __future__ import annotations

from .embedding import MLXEmbeddingModel


class MLXRerankerModel:
    """Scores documents by how near their vector is to the query's."""

    def __init__(self, model_name: str):
        self._embedder = MLXEmbeddingModel(model_name)

    def load(self) -> None:
        self._embedder.load()

    def close(self) -> None:
        self._embedder.close()

    def rerank(
        self, query: str, documents: list[str], max_length: int | None = None
    ) -> tuple[list[float], int]:
        """Scores in document order, and the tokens read; one forward per document."""
        wanted = self._embedder.embed([query], max_length)
        scores, tokens = [], wanted.total_tokens
        for document in documents:
            found = self._embedder.embed([document], max_length)
            pairs = zip(wanted.embeddings[0], found.embeddings[0], strict=True)
            scores.append(sum(a * b for a, b in pairs))
            tokens += found.total_tokens
        return scores, tokens
