"""How a prompt becomes text."""

import sys

from streamspec.prompt import prompt_format

sys.modules["streamspec.prompt_format"] = prompt_format  # its name up to 0.1, in pickles; kept for one minor version
