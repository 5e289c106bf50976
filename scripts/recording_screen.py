"""The screen of a terminal, and its picture as SVG: scripts/recording.

The screen understands what `vshunt top` sends to a terminal of type xterm-256color: text, moves of the cursor, colours and
attributes. Anything else is an error, so that a picture never shows less than the terminal did.
"""

import re
from dataclasses import dataclass, replace
from html import escape

import recording_svg
from recording_svg import CHARACTER_PX, LINE_PX

# A control sequence: private mark, numbers, final character (ECMA-48, 5.4).
SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")
# The 16 colours of the palette, readable on the background of recording_svg.
PALETTE = (
    "#4c566a", "#e06c75", "#98c379", "#e5c07b", "#81a1c1", "#c678dd", "#8fbcbb", "#d8dee9",
    "#7f8aa3", "#ff7b86", "#b5e08f", "#ffd98a", "#9ec1e6", "#dd93ef", "#a9dcdb", "#ffffff",
)
TEXT, BACKGROUND, DIM = "#d8dee9", "#20242c", "#8a93a6"
# From the bottom of a line up to the line on which its characters stand.
BASE_PX = 5


@dataclass(frozen=True)
class Style:
    """How a character looks. `colour`: a number of the palette, or None for that of text."""

    colour: int | None = None
    bold: bool = False
    dim: bool = False
    underlined: bool = False
    reversed: bool = False


PLAIN = Style()
ON = {1: "bold", 2: "dim", 4: "underlined", 7: "reversed"}
OFF = {22: ("bold", "dim"), 24: ("underlined",), 27: ("reversed",)}


class Screen:
    """Lines of cells, each a character and its style. It begins with an empty screen and the cursor in the corner."""

    def __init__(self, columns, rows):
        self.columns, self.rows = columns, rows
        self.style, self.row, self.column = PLAIN, 0, 0
        # What arrived of a control sequence.
        self.rest = ""
        self._clear()

    def _clear(self):
        self.cells = [[(" ", PLAIN)] * self.columns for _ in range(self.rows)]

    def lines(self):
        """The text of each line."""
        return ["".join(character for character, _ in line).rstrip() for line in self.cells]

    def feed(self, text):
        """Shows what a program has written. Raises ValueError for what it does not know."""
        text, self.rest, at = self.rest + text, "", 0
        while at < len(text):
            character = text[at]
            if character == "\x1b":
                found = SEQUENCE.match(text, at)
                if not found:
                    if len(text) - at < 32 and not re.match(r"\x1b[^\[]|\x1b\[[?0-9;]*[^?0-9;]", text[at:]):
                        self.rest = text[at:]
                        return
                    raise ValueError(f"the terminal is sent {text[at:at + 12]!r}, which this program does not draw")
                self._control(*found.groups())
                at = found.end()
                continue
            if character == "\r":
                self.column = 0
            elif character == "\n":
                self.row = min(self.row + 1, self.rows - 1)
            elif character.isprintable() and self.row < self.rows and self.column < self.columns:
                self.cells[self.row][self.column] = (character, self.style)
                self.column += 1
            else:
                raise ValueError(f"the terminal is sent {character!r} in column {self.column}, which this program does not draw")
            at += 1

    def _control(self, private, numbers, final):
        values = [int(number or 0) for number in numbers.split(";")]
        if private and final in "hl":
            # The other screen is empty at first. Modes of the cursor and of pasting are not
            # visible.
            if 1049 in values:
                self._clear()
        elif final == "H" and not private:
            row, column = (values + [1])[:2]
            self.row, self.column = max(row, 1) - 1, max(column, 1) - 1
        elif final == "J" and values == [2]:
            self._clear()
        elif final == "m" and not private:
            self._attributes(values)
        else:
            raise ValueError(f"the terminal is sent the sequence {private}{numbers}{final}, which this program does not draw")

    def _attributes(self, values):
        """Colours and attributes (ECMA-48, 8.3.117; 38;5;N and 48;5;N as xterm has them)."""
        values = list(values)
        while values:
            value = values.pop(0)
            if value == 0:
                self.style = PLAIN
            elif value in ON:
                self.style = replace(self.style, **{ON[value]: True})
            elif value in OFF:
                self.style = replace(self.style, **dict.fromkeys(OFF[value], False))
            elif 30 <= value <= 37 or 90 <= value <= 97:
                self.style = replace(self.style, colour=value - 30 if value < 90 else value - 82)
            elif value == 39:
                self.style = replace(self.style, colour=None)
            elif value == 38 and len(values) > 1 and values[0] == 5 and values[1] < 16:
                self.style = replace(self.style, colour=values[1])
                del values[:2]
            elif value not in (49, 59):  # the usual background, and the usual colour of an underline
                raise ValueError(f"the terminal is sent the attribute {value}, which this program does not draw")


def runs(line):
    """The parts of a line of cells that have one style, as (first column, text, style)."""
    parts = []
    for column, (character, style) in enumerate(line):
        if parts and parts[-1][2] == style:
            parts[-1][1].append(character)
        else:
            parts.append((column, [character], style))
    return [(column, "".join(characters), style) for column, characters, style in parts]


def drawn(column, text, style, row):
    """One part of a line, and what is behind it."""
    colour = TEXT if style.colour is None else PALETTE[style.colour]
    if style.dim and style.colour is None:
        colour = DIM
    x, width = round(column * CHARACTER_PX, 1), round(len(text) * CHARACTER_PX, 1)
    shapes = ""
    if style.reversed:
        shapes = f'<rect x="{x}" y="{row * LINE_PX}" width="{width}" height="{LINE_PX}" fill="{colour}"/>'
        colour = BACKGROUND
    body = text.rstrip()
    if not body and not style.underlined:
        return shapes
    if style.underlined:
        # A line of its own: underlines of spaces differ between viewers.
        y = (row + 1) * LINE_PX - BASE_PX + 2.5
        shapes += f'<path d="M{x} {y}h{width}" stroke="{colour}"/>'
    lead = len(body) - len(body.lstrip())
    x, body = round((column + lead) * CHARACTER_PX, 1), body.strip()
    if not body:
        return shapes
    length = round(len(body) * CHARACTER_PX, 1)
    weight = ";font-weight:bold" if style.bold else ""
    shown = escape(body, quote=False).replace(" ", "\N{NO-BREAK SPACE}")
    y = (row + 1) * LINE_PX - BASE_PX
    return f'{shapes}<text x="{x}" y="{y}" style="fill:{colour}{weight}" textLength="{length}">{shown}</text>'


def picture(screen):
    """The picture of a screen."""
    lines = ("".join(drawn(*run, row) for run in runs(line)) for row, line in enumerate(screen.cells))
    return recording_svg.window(screen.columns, screen.rows, "".join(line + "\n" for line in lines if line))
