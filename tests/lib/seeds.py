"""Where the generators of random numbers start."""

import os

SEED = int(os.environ.get("VSHUNT_SEED", "1"))
