"""PyInstaller runtime hook, run before the application: what cannot be seen from outside.

Writes down what the telemetry variable is when onnxruntime is first asked for. Asked to (`GRAMMAR`), it makes a grammar
instead of a window.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class Witness(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "onnxruntime" and name not in sys.modules and "WITNESS" in os.environ:
            Path(os.environ["WITNESS"]).write_text(os.environ.get("ORT_DISABLE_TELEMETRY", "not set"))


sys.meta_path.insert(0, Witness())

if "GRAMMAR" in os.environ:
    from streamspec.runtime import Grammar

    print(Grammar.choice(["yes", "no"]).kind, flush=True)
    os._exit(0)
