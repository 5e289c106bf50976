"""Tests the recording that the README shows and the picture of `vshunt top`: the script that makes them, and the files in docs/pictures."""

import importlib.machinery
import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ET

import pytest
import rig as r

PICTURES = r.ROOT / "docs/pictures"
SVG_BYTES_MAX = 500_000


@pytest.fixture(scope="module")
def recording():
    """scripts/recording as a module."""
    sys.path.insert(0, str(r.ROOT / "scripts"))
    try:
        loader = importlib.machinery.SourceFileLoader("recording", str(r.ROOT / "scripts/recording"))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader("recording", loader))
        loader.exec_module(module)
    finally:
        sys.path.remove(str(r.ROOT / "scripts"))
    return module


def events(path):
    """What a recording shows, as (seconds, text)."""
    header, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    r.require(header["version"] == 2 and header["width"] > 0 and header["height"] > 0, f"{header}")
    r.require(all(kind == "o" for _, kind, _ in lines), "there is something other than output")
    times = [at for at, _, _ in lines]
    r.require(times == sorted(times), "the times do not grow")
    return [(at, text) for at, _, text in lines]


def drawn(path):
    """The texts of a picture."""
    r.require(path.stat().st_size < SVG_BYTES_MAX, f"{path.name} has {path.stat().st_size} bytes")
    # The file is one of the project, or was just made by it.
    root = ET.parse(path).getroot()
    return [(node.text or "").replace("\N{NO-BREAK SPACE}", " ") for node in root.iter("{http://www.w3.org/2000/svg}text")]


def shows_top(recording, path):
    """The picture of `vshunt top` has all queues under load, the keys, and colours of the workers' bars."""
    texts = drawn(path)
    for name, _, queues, _, load in recording.recording_top.DISKS:
        for queue in range(queues):
            shown = any(text.startswith(f"{name}:{queue} ") for text in texts)
            r.require(shown == bool(load), f"{name}:{queue}: {texts}")
    r.require(texts[0].startswith("vshunt top: ") and texts[-1].endswith("q quit"), f"{texts}")
    r.require(any(text.startswith("|") for text in texts), f"no bar: {texts}")


def test_a_short_recording(rig, recording):
    for program in ("vshunt", "vshunt-bench"):
        r.binary(program)
    out = rig.dir / "pictures"
    done = r.run([r.ROOT / "scripts/recording", "--short", "--folder", rig.dir / "demo", "--out", out], timeout_s=300, check=False)
    r.require(done.returncode == 0, f"it ended with {done.returncode}: {done.stdout}{done.stderr}")
    r.require(not (rig.dir / "demo").exists(), "the folder of the session was left behind")
    shown = events(out / "tour.cast")
    r.require("reconnects: 1" in "".join(text for _, text in shown), "the load did not outlive the daemon")
    texts = drawn(out / "tour.svg")
    r.require(any(text.startswith("verified: ") for text in texts), f"{texts[-20:]}")
    r.require(any(text.startswith("vm0:3 ") for text in drawn(out / "status.svg")), "the status has no queue 3")
    shows_top(recording, out / "top.svg")


def test_a_folder_that_exists_is_left_alone(rig):
    done = r.run([r.ROOT / "scripts/recording", "--folder", rig.dir, "--out", rig.dir], check=False)
    r.require(done.returncode == 1 and "name another folder with --folder" in done.stderr, done.stderr)


def test_the_recording_is_of_these_commands(recording):
    """The recording in the project is that of the script as it is now. `make recording` makes it again."""
    shown = events(PICTURES / "tour.cast")
    r.require(45 < shown[-1][0] < 90, f"it takes {shown[-1][0]} s")
    text = "".join(text for _, text in shown).replace("\r\n", "\n").replace("\n> ", "\n")
    for command, _ in recording.STEPS:
        r.require(f"$ {command}\n" in text, f"it does not show {command!r}")


def test_the_pictures_do_not_name_a_machine(recording):
    for path in PICTURES.iterdir():
        text = path.read_text(encoding="utf-8").replace('"http://www.w3.org/2000/svg"', "").replace('"/bin/bash"', "")
        found = recording.FOREIGN.findall(text) + re.findall(r"https?://\S+", text)
        r.require(not found, f"{path.name} has {found}")
    drawn(PICTURES / "tour.svg")
    drawn(PICTURES / "status.svg")
    shows_top(recording, PICTURES / "top.svg")


def test_the_screen_of_a_terminal(recording):
    screens = recording.recording_screen
    screen = screens.Screen(10, 3)
    # A sequence and a style in two parts.
    for part in ("\x1b[?1049h\x1b[2J\x1b[1;1Habcdefghij\x1b[2;3H\x1b[1;38;5;",
                 "9mhot\x1b[22;39m \x1b[7mon\x1b[27m\r\n\x1b[", "2mdim\x1b[0m", "\x1b[1;2HB"):
        screen.feed(part)
    r.require(screen.lines() == ["aBcdefghij", "  hot on", "dim"], f"{screen.lines()}")
    hot, rest = screens.Style(colour=9, bold=True), screens.Style(reversed=True)
    r.require(screens.runs(screen.cells[1])[1:4] == [(2, "hot", hot), (5, " ", screens.PLAIN), (6, "on", rest)], f"{screens.runs(screen.cells[1])}")
    picture = screens.picture(screen)
    r.require(f'fill:{screens.PALETTE[9]};font-weight:bold" textLength="25.2">hot</text>' in picture, picture)


@pytest.mark.parametrize("sent", ["\x1b[3S", "\x1b]0;title\x07", "\x1b[48;5;1m", "\x1b7", "\x1b[1;10Hxy", "\t"])
def test_what_a_screen_does_not_know_is_an_error(recording, sent):
    with pytest.raises(ValueError, match="does not draw"):
        recording.recording_screen.Screen(10, 3).feed(sent)
