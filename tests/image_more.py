"""The part of tests/image about images that change: size, snapshots, bitmaps."""


class Changes:
    """Nothing yet but what `tests/image` has."""

    def __init__(self, rig, both):
        self.rig = rig
        self.both = both

    def tests(self):
        pass
