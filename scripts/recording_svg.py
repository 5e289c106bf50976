"""Draws what a terminal has shown, as SVG: scripts/recording.

A session without cursor movement is a page of lines that grows. Each state of a line is a text with
the times at which it appears and disappears, and the page is moved up when it is longer than the
window. A viewer that does not animate shows the end of the session.
"""

from html import escape

CHARACTER_PX, LINE_PX, FONT_PX, MARGIN_PX = 8.4, 19, 14, 14
# States of a line that follow each other faster than this are drawn as one.
STATE_S = 0.09
# The end stays this long before the animation begins again.
END_S = 4.0

STYLE = (
    f"text{{font:{FONT_PX}px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d8dee9}}"
    ".c{fill:#8fbcbb}.p{fill:#fff;font-weight:bold}"
)


class Line:
    """A line of the page: its states in order, as (time in seconds, text)."""

    def __init__(self, at):
        self.states = [(at, "")]

    def set(self, at, text):
        last, _ = self.states[-1]
        if len(self.states) > 1 and at - last < STATE_S:
            self.states[-1] = (last, text)
        else:
            self.states.append((at, text))

    @property
    def text(self):
        return self.states[-1][1]


def page(events, columns):
    """The lines that a terminal of this width shows, from (time, text)."""
    lines, column = [Line(0.0)], 0
    for at, text in events:
        for character in text:
            if character == "\n":
                lines.append(Line(at))
                column = 0
            elif character == "\r":
                column = 0
            elif character == "\a":
                pass
            elif character.isprintable():
                if column == columns:
                    lines.append(Line(at))
                    column = 0
                shown = lines[-1].text.ljust(column)
                lines[-1].set(at, shown[:column] + character + shown[column + 1:])
                column += 1
            else:
                raise ValueError(f"the terminal shows {character!r}, which this program does not draw")
    return lines


def text(line, y, attributes="", inside=""):
    """One text of the page. Commands and remarks have other colours than output."""
    kind = ' class="c"' if line.startswith("$ #") else ' class="p"' if line.startswith(("$ ", "> ")) else ""
    line = line.rstrip()
    length = round(len(line) * CHARACTER_PX, 1)
    # A viewer may join spaces that follow each other, but not these.
    shown = escape(line, quote=False).replace(" ", "\N{NO-BREAK SPACE}")
    return f'<text y="{y}"{kind} textLength="{length}"{attributes}>{shown}{inside}</text>'


def window(columns, rows, inside):
    """A picture of this size."""
    width, height = round(columns * CHARACTER_PX + 2 * MARGIN_PX), rows * LINE_PX + 2 * MARGIN_PX
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{STYLE}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#20242c"/>'
        f'<svg x="{MARGIN_PX}" y="{MARGIN_PX}" width="{width - 2 * MARGIN_PX}" height="{height - 2 * MARGIN_PX}">{inside}</svg></svg>\n'
    )


def still(shown, columns):
    """A picture of a text."""
    lines = [line.text for line in page([(0.0, shown)], columns)]
    while lines and not lines[-1].strip():
        lines.pop()
    drawn = "".join(text(line, (at + 1) * LINE_PX - 5) + "\n" for at, line in enumerate(lines) if line.strip())
    return window(columns, len(lines), drawn)


def animated(events, columns, rows):
    """A picture that plays a session, again and again."""
    lines = page(events, columns)
    total = events[-1][0] + END_S
    drawn = []
    for at, line in enumerate(lines):
        ends = [begin for begin, _ in line.states[1:]] + [None]
        for (begin, shown), end in zip(line.states, ends):
            if shown.strip():
                hidden = "" if end is None else ' visibility="hidden"'
                drawn.append(text(shown, (at + 1) * LINE_PX - 5, hidden, seen(begin, end, total)))
    # The page moves up by a line each time that a line begins below the window.
    moves = [(line.states[0][0], at + 1 - rows) for at, line in enumerate(lines) if at >= rows]
    times, places = ["0"], ["0 0"]
    for begin, up in moves:
        moment = fraction(begin, total)
        if moment == times[-1]:
            places[-1] = f"0 {-up * LINE_PX}"
        else:
            times.append(moment)
            places.append(f"0 {-up * LINE_PX}")
    move = (
        f'<animateTransform attributeName="transform" type="translate" calcMode="discrete" dur="{total:.2f}s" repeatCount="indefinite" '
        f'keyTimes="{";".join(times)}" values="{";".join(places)}"/>'
    )
    up = max(0, len(lines) - rows) * LINE_PX
    return window(columns, rows, f'<g transform="translate(0 {-up})">{move}\n' + "\n".join(drawn) + "\n</g>")


def seen(begin, end, total):
    """The animation of a text that is there from `begin` to `end`, in seconds; None: to the end."""
    times, values = ["0", fraction(begin, total)], ["hidden", "visible"]
    if end is not None:
        times.append(fraction(end, total))
        values.append("hidden")
    if times[1] == "0":
        times, values = times[1:], values[1:]
    return (
        f'<animate attributeName="visibility" calcMode="discrete" dur="{total:.2f}s" repeatCount="indefinite" '
        f'keyTimes="{";".join(times)}" values="{";".join(values)}"/>'
    )


def fraction(at, total):
    """A time as a part of the whole, for keyTimes."""
    return f"{at / total:.4f}".rstrip("0").rstrip(".") or "0"
