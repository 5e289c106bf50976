"""Tests random operations on the mounted file against a plain file, and writers of one sector."""

import pytest
from fuse_model import Case

PLACES = {
    "disk": {"direct": "on"},  # an image on a disk, with O_DIRECT
    "memory": {"memory": True, "direct": "off"},
    "ram": {"disk": "format=ram,size={size}"},
}


@pytest.mark.parametrize("place", PLACES)
def test_random_operations(suite, place):
    Case(suite, f"walk-{place}", **PLACES[place]).walk()


@pytest.mark.parametrize("place", ("disk", "memory"))
def test_random_operations_growable(suite, place):
    Case(suite, f"grow-{place}", **PLACES[place]).walk(True)


@pytest.mark.parametrize("place", PLACES)
def test_neighbours_in_one_sector(suite, place):
    Case(suite, f"near-{place}", **PLACES[place]).neighbours()
