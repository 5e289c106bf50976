"""Runs docs/guide/libvirt.md as it is written."""

import guide


def test_page(booted, record):
    guide.Player(booted, record).play(guide.page("libvirt.md"))
