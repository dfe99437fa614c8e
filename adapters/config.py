"""The name up to 0.1 of `streamspec.adapters.training.config`, which pickles of a `TrainConfig` carry. Kept for one
minor version; covered by `tests/core/test_package.py`.
"""

from streamspec.adapters.training.config import TrainConfig

__all__ = ["TrainConfig"]
