"""Training: a base model and data in, an adapter folder out (torch, transformers, peft)."""

import logging

# Where it is installed, PEFT loads it: it warns of kernels it could have, and of a cast in every product.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
