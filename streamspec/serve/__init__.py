"""Serves a bundle as a local, OpenAI-compatible server. Loopback only, with a token; see docs/guides/serve.md."""

from streamspec.serve.app import create_app
from streamspec.serve.limits import Limits
from streamspec.serve.server import Server, serve

__all__ = ["Limits", "Server", "create_app", "serve"]
