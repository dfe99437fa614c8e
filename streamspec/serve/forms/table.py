"""Lists the forms of the API beside OpenAI's. tests/serve/forms covers this folder."""

from __future__ import annotations

from typing import Any

from streamspec.serve.errors import ApiError
from streamspec.serve.forms.anthropic import ANTHROPIC
from streamspec.serve.forms.ollama import OLLAMA

FORMS = (OLLAMA, ANTHROPIC)


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """Returns the JSON object that clients of a path expect of an error."""
    form = next((form for form in FORMS if path.startswith(form.paths)), None)
    return error.body if form is None else form.error(error)
