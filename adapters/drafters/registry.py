"""The drafters in training: a row of this table each. Free of torch; the networks are imported on use.

To add a drafter, add a folder with its network (`model.py`, a `DraftingModel`) and its options and row (`options.py`),
and name both below. `medusa` is the smallest.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamspec.adapters.base_models.config_fields import BaseConfig
from streamspec.adapters.drafters.dflash.options import DFLASH, BlockOptions, CausalOptions
from streamspec.adapters.drafters.draft_layer.options import (
    EAGLE,
    HYDRA,
    JAKIRO,
    MTP,
    JakiroOptions,
    ModulesOptions,
    PrefixOptions,
    UnrolledOptions,
)
from streamspec.adapters.drafters.drafter_method import DrafterMethod
from streamspec.adapters.drafters.dspark.options import DSPARK
from streamspec.adapters.drafters.eagle3.options import EAGLE3
from streamspec.adapters.drafters.medusa.options import MEDUSA, MedusaOptions
from streamspec.adapters.drafters.options import DraftLayerOptions, TrainedAloneOptions
from streamspec.adapters.drafters.shared_layer.options import EAGLE_LORA
from streamspec.adapters.drafters.streams.options import STREAMING, StreamingOptions
from streamspec.errors import ConfigError
from streamspec.model_families import FAMILIES

DRAFTERS = {
    "streaming": STREAMING,
    "medusa": MEDUSA,
    "jakiro": JAKIRO,
    "eagle": EAGLE,
    "eagle-lora": EAGLE_LORA,
    "mtp": MTP,
    "hydra": HYDRA,
    "eagle3": EAGLE3,
    "dflash": DFLASH,
    "dspark": DSPARK,
    "lora": DrafterMethod(),
}
AUTO = "auto"
CHOSEN = ("streaming", "eagle", "medusa")  # of auto: the first that can draft for the base's layers


@dataclass
class MethodOptions(  # dataclass fields come in the order of these bases read from the last to the first
    TrainedAloneOptions,
    CausalOptions,
    BlockOptions,
    JakiroOptions,
    UnrolledOptions,
    ModulesOptions,
    PrefixOptions,
    DraftLayerOptions,
    MedusaOptions,
    StreamingOptions,
):
    """The options of all methods. A new group is added here."""


def readers(group: type) -> tuple[str, ...]:
    """The methods that read an option group; empty for a group that no method claims, which all accept."""
    return tuple(name for name, row in DRAFTERS.items() if group in row.options)


def chosen_method(method: str, base: BaseConfig) -> str:
    """Returns the method; of `auto` the first of `CHOSEN` that can draft for the layers of this base. Raises
    ConfigError if it cannot.
    """
    method = _able(base) if method == AUTO else method
    check_drafted(method, base)
    return method


def check_drafted(method: str, base: BaseConfig) -> None:
    """Raises ConfigError if `method` cannot draft for the layers of this base."""
    if (layers := DRAFTERS[method].unsupported_layers(FAMILIES[base.model_type], base)) is not None:
        found = f"--method {method} for {base.model_type}, whose layers {layers}"
        raise ConfigError(found, "a drafter for such layers", f"take --method {_able(base)}")


def _able(base: BaseConfig) -> str:
    family = FAMILIES[base.model_type]
    return next(name for name in CHOSEN if DRAFTERS[name].unsupported_layers(family, base) is None)
