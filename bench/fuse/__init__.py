"""The FUSE export beside QEMU's: cases.py has the cases that run.py knows, the rest is behind it."""
