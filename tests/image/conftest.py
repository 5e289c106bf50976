"""Both programs, in a folder that the tests of a file share."""

import pytest
from images import Both


@pytest.fixture(scope="module")
def both(rig):
    return Both(rig)
