"""Parses the body of `POST /v1/embeddings` and builds its response. Covered by `tests/serve/test_embeddings.py`."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np

from streamspec.bundle.model_section import ModelInfo
from streamspec.serve.api.body import bounded, json_object, parsed_as
from streamspec.serve.api.chat_requests import TokenIds
from streamspec.serve.api.fields import Strict
from streamspec.serve.errors import ApiError, invalid
from streamspec.serve.limits import Limits


class EmbeddingsBody(Strict):
    """The fields. `pooling` is ours."""

    model: str
    input: str | TokenIds | list[str] | list[TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None
    user: str | None = None  # changes nothing

    @property
    def texts(self) -> list[Any]:
        """Texts or token ids, one of each vector."""
        several = isinstance(self.input, list) and bool(self.input) and not isinstance(self.input[0], int)
        return list(self.input) if several else [self.input]

    def check(self, model: ModelInfo) -> None:
        """Raises ApiError where the target of a bundle cannot give these vectors."""
        if not model.embeddings:
            raise ApiError(
                400,
                f"embeddings of {self.model}; expected a bundle of `streamspec export --embeddings`; export it again",
                "no_embeddings",
                "model",
            )
        if self.dimensions not in (None, model.hidden_size):
            expected = f"expected {model.hidden_size}, the model's"
            raise invalid(f"dimensions {self.dimensions}; {expected}", "dimensions", "unsupported_value")

    def response(self, vectors: np.ndarray, tokens: int) -> dict[str, Any]:
        """The object to send for float32 vectors [texts, hidden] of so many tokens."""
        data = [
            {"object": "embedding", "index": number, "embedding": self._encoded(vector)}
            for number, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    def _encoded(self, vector: np.ndarray) -> Any:
        if self.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return vector.tolist()


def read_embeddings(body: bytes, limits: Limits) -> EmbeddingsBody:
    """Parses a body. Raises ApiError, status 400, naming the field."""
    request = parsed_as(EmbeddingsBody, json_object(body))
    if not request.input:
        raise invalid("an empty input; expected some text", "input")
    texts = request.texts
    if len(texts) > limits.inputs:
        raise invalid(f"{len(texts)} texts; expected at most {limits.inputs}", "input", "too_large")
    bounded(sum(map(len, texts)), limits.text, "input")
    return request
