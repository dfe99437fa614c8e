"""What is fuzzed: for each target a corpus of good samples, how they are spoilt, and what is done with the result.

Nothing but a StreamspecError may come out. Files are written to a folder of the run's own.
"""

from __future__ import annotations

from tests.fuzz.targets.configurations import CONFIGURATIONS
from tests.fuzz.targets.kept_files import KEPT_FILES
from tests.fuzz.targets.model_files import MODEL_FILES
from tests.fuzz.targets.packed import PACKED
from tests.fuzz.targets.target import Target
from tests.fuzz.targets.user_text import USER_TEXT
from tests.fuzz.targets.vocabularies import VOCABULARIES

TARGETS: dict[str, Target] = CONFIGURATIONS | MODEL_FILES | KEPT_FILES | PACKED | USER_TEXT | VOCABULARIES
