"""streamspec.chat: a conversation in the terminal.

`line_input` reads lines, `commands` has one row per slash command, `draft_marks` marks drafted tokens in the answer,
`terminal` puts them together.
"""

from __future__ import annotations
