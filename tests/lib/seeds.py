"""Seeds of the random number generators."""

import os

SEED = int(os.environ.get("VSHUNT_SEED", "1"))
