"""PyInstaller runtime hook, run before the application: writes down what the telemetry variable is when onnxruntime is first asked for."""

import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class Witness(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "onnxruntime" and name not in sys.modules:
            Path(os.environ["WITNESS"]).write_text(os.environ.get("ORT_DISABLE_TELEMETRY", "not set"))


sys.meta_path.insert(0, Witness())
