"""The row of speculative streams in the table of drafters. Free of torch."""

from __future__ import annotations

from streamspec.adapters.drafters.drafter_method import HARD, STAGED, DrafterMethod
from streamspec.adapters.drafters.options import TrainedAloneOptions
from streamspec.adapters.drafters.streams.config import check_exits, check_warm_streams
from streamspec.adapters.drafters.streams.options import StreamingOptions

STREAMING = DrafterMethod(
    "streamspec.adapters.drafters.streams.model:StreamingModel",
    (TrainedAloneOptions, StreamingOptions),
    defaults=HARD,
    warm_start=STAGED,
    check_base=check_exits,
    check_warm_start=check_warm_streams,
)
