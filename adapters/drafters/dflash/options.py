"""Options of block drafters. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from streamspec.option_fields import option


@dataclass
class BlockOptions:
    """Block drafters"""

    block_layers: int = option(1, "layers of the drafter's own, which start as the target's last ones", minimum=1)
