"""What differs between models: the supported families, and where multimodal checkpoints keep their text model."""

from streamspec.model_families.families import FAMILIES, family_of, supported, turned_back
from streamspec.model_families.family import Family, factor, switched

__all__ = ["FAMILIES", "Family", "factor", "family_of", "supported", "switched", "turned_back"]
