"""Runs the commands of a page of the guide as they are written.

Each fenced block of a page has a comment in front of it, which the book does not show:

    <!-- run -->            a shell runs it on the host, and each command has to succeed
    <!-- start -->          the same, but it runs until the page or the test ends it; the test waits until it says "serving"
    <!-- boot -->           a VMM in the foreground, or a program that connects to a guest: its terminal is the console of the guest
    <!-- guest -->          the shell of the guest runs it, again until it succeeds: a guest sees changes a moment later
    <!-- file: PATH -->     a file of the host
    <!-- output -->         what a command prints
    <!-- not run: WHY -->   not run, and the test says why

`<!-- run, shows: REGEX -->` and `<!-- guest, shows: REGEX -->` also want a line of the output that matches. A block without a
comment is an error, so that a test forgets none.
"""

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import rig as r
from guide_guest import Console

FENCE = re.compile(r"^ *```(\S*) *$")
COMMENT = re.compile(r"^<!-- (run|start|boot|guest|output|file: (\S+)|not run: (.+?))(?:, shows: (.+))? -->$")
KINDS = ("run", "guest")


@dataclass
class Block:
    """One fenced block of a page."""

    place: str
    kind: str
    text: str
    file: str | None = None
    why: str | None = None
    shows: str | None = None


def blocks(page, name):
    """The blocks of the text of a page, in order."""
    found, lines, comment = [], page.splitlines(), None
    inside = None
    for number, line in enumerate(lines, 1):
        place = f"{name}:{number}"
        if inside is not None:
            if FENCE.match(line):
                found.append(inside)
                inside = None
            else:
                inside.text += line + "\n"
            continue
        if FENCE.match(line):
            r.require(comment, f"{place}: the block has no comment that says how it is tested; tests/lib/guide.py lists them")
            kind = comment[1].split(":")[0]
            inside = Block(place, kind, "", comment[2], comment[3], comment[4])
            r.require(not inside.shows or kind in KINDS, f"{place}: only {' and '.join(KINDS)} blocks have `shows`")
            comment = None
        elif line.startswith("<!--"):
            comment = COMMENT.match(line)
            r.require(comment, f"{place}: {line} is no comment that tests/lib/guide.py knows")
        elif comment:
            raise r.Failed(f"{place}: there is no block behind the comment of the line before")
    r.require(inside is None, f"{name}: the last block has no end")
    return found


def page(name):
    """The blocks of a page of docs/guide."""
    path = r.ROOT / "docs/guide" / name
    return blocks(path.read_text(encoding="utf-8"), path.relative_to(r.ROOT))


def marked(path):
    """Whether a page has a block that is to be run."""
    return any(COMMENT.match(line) for line in path.read_text(encoding="utf-8").splitlines())


def descendants(pid):
    """The processes below one: nsenter stays outside of the root, and what it runs would outlive it."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split() if Path(f"/proc/{pid}").exists() else []:
        found += [int(child), *descendants(int(child))]
    return found


class Player:
    """Runs the blocks of a page in a booted root."""

    def __init__(self, root, record):
        self.root, self.record = root, record
        self.console = None

    def play(self, found):
        """Runs all blocks. Programs that still run then are ended."""
        before = len(self.root.rig.children)
        try:
            for block in found:
                getattr(self, block.kind.replace(" ", "_"))(block)
        finally:
            for child in reversed(self.root.rig.children[before:]):
                for pid in descendants(child.pid):
                    # It may have ended with the one before.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                # nsenter has to reap its child: a zombie of another parent would keep the root from
                # ending.
                child.wait()

    def argv(self, block):
        return self.root.argv("sh", "-euc", f"cd\n{block.text}")

    def run(self, block):
        # The shell itself does not end for `! COMMAND` that succeeds.
        script = re.sub(r"^! (.+)$", r"if \1; then exit 9; fi", block.text, flags=re.MULTILINE)
        try:
            said = self.root.shell(f"cd\n{script}")
        except r.Failed as e:
            raise r.Failed(f"{block.place}: {e}") from e
        shown = not block.shows or re.search(block.shows, said, re.MULTILINE)
        r.require(shown, f"{block.place}: no line matches {block.shows}: {said[-1000:]}")

    def start(self, block):
        child = r.Child(self.root.rig, f"page-{len(self.root.rig.children)}", self.argv(block))
        r.wait_for(f"the daemon of {block.place} serves", lambda: "serving" in child.output() or not child.running())
        r.require(child.running(), f"{block.place}: it ended: {child.tail()}")

    def boot(self, block):
        self.console = Console(self.root.rig, self.argv(block), block.place)
        self.console.up()

    def guest(self, block):
        r.require(self.console, f"{block.place}: there is no guest yet")
        said = [""]

        def good():
            status, said[0] = self.console.run(block.text)
            return status == 0 and (not block.shows or re.search(block.shows, said[0], re.MULTILINE))

        try:
            r.wait_for(f"{block.place}: `{block.text.strip()}` in the guest", good, every_s=0.5)
        except r.Failed as e:
            raise r.Failed(f"{e}; it printed {said[0]!r}, and {block.shows!r} is wanted") from e

    def file(self, block):
        self.root.write(block.file.lstrip("/"), block.text)

    def output(self, block):
        """Nothing: `shows` of the block before says what is checked."""

    def not_run(self, block):
        self.record("skip", f"{block.place}: {block.why}")
