"""The comments by which the pages of the guide say how they are tested, and that a test runs each of these pages."""

from pathlib import Path

import guide
import pytest
import rig as r

FOLDER = r.ROOT / "docs/guide"
GOOD = """# Page

<!-- run, shows: ^one$ -->
```
echo one
```

<!-- file: /etc/vshunt/a.toml -->
```toml
# one
```

<!-- not run: there is no KVM -->
```
crosvm run
```
"""


def test_comments_are_read():
    found = guide.blocks(GOOD, "page.md")
    r.require([b.kind for b in found] == ["run", "file", "not run"], f"{found}")
    r.require(found[0].shows == "^one$" and found[0].text == "echo one\n", f"{found[0]}")
    r.require(found[1].file == "/etc/vshunt/a.toml" and found[2].why == "there is no KVM", f"{found}")
    r.require(found[2].place == "page.md:14", found[2].place)


@pytest.mark.parametrize("text, message", [
    ("```\nls\n```\n", "has no comment"),
    ("<!-- rum -->\n```\nls\n```\n", "no comment that"),
    ("<!-- run -->\n\n```\nls\n```\n", "no block behind"),
    ("<!-- run -->\n```\nls\n", "has no end"),
    ("<!-- file: /a, shows: b -->\n```\nls\n```\n", "have `shows`"),
], ids=("none", "unknown", "alone", "open", "shows"))
def test_comments_that_are_wrong(text, message):
    try:
        guide.blocks(text, "page.md")
    except r.Failed as e:
        r.require(message in str(e) and "page.md:" in str(e) or message == "has no end", f"{e}")
    else:
        raise r.Failed(f"{text!r} is taken")


def test_each_page_has_its_test(record):
    """Pages with such comments have one for each block, and a test, unless nothing in them can be run."""
    pages = [path for path in sorted(FOLDER.glob("*.md")) if guide.marked(path)]
    r.require(pages, "no page has comments for its test")
    for path in pages:
        found = guide.page(path.name)
        test = Path(__file__).with_name(f"test_{path.stem.replace('-', '_')}.py")
        if all(block.kind == "not run" for block in found):
            for block in found:
                record("skip", f"{block.place}: {block.why}")
        else:
            r.require(test.exists(), f"{path.name} has commands to run, and {test.name} is missing")
