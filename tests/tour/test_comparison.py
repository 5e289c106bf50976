"""Tests that each row of the comparison has its evidence, and that the commands named there exist."""

import re

import rig as r

PAGE = r.ROOT / "docs/comparison.md"


def test_each_row_has_a_footnote():
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == 8 and not line.startswith(("| | ", "| ---"))]
    r.require(len(rows) > 20, f"only {len(rows)} rows are found")
    named = [re.search(r"\[\^([\w-]+)\]", row) for row in rows]
    r.require(all(named), f"rows without a footnote: {[row for row, name in zip(rows, named) if not name]}")
    defined = re.findall(r"^\[\^([\w-]+)\]: ", text, re.MULTILINE)
    r.require(sorted(name[1] for name in named) == sorted(defined), "rows and footnotes are not the same")


def test_the_commands_exist():
    text = PAGE.read_text(encoding="utf-8").replace("\n    ", " ")
    commands = [command for command in re.findall(r"`([^`]+)`", text) if command.startswith(("scripts/", "cargo ", "make "))]
    r.require(len(commands) > 15, f"only {len(commands)} commands are found")
    tests = {path.stem for path in (r.ROOT / "crates/vshunt/tests").glob("*.rs")}
    tests |= {path.parent.name for path in (r.ROOT / "crates/vshunt/tests").glob("*/main.rs")}
    targets = re.findall(r"^([a-z-]+):", (r.ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    cases = "".join(path.read_text(encoding="utf-8") for path in (r.ROOT / "bench").glob("*.py"))
    missing = []
    for command in commands:
        program, *words = command.split()
        if program == "make":
            found = words[0] in targets
        elif program == "cargo":
            found = words[words.index("--test") + 1] in tests
        elif program == "scripts/bench":
            found = re.search(rf"\b{words[words.index('--only') + 1]}\b", cases)
        else:
            found = all((r.ROOT / word).exists() for word in words if word.startswith("tests/")) and (r.ROOT / program).exists()
        if not found:
            missing.append(command)
    r.require(not missing, f"commands of {PAGE.name} that are not there: {missing}")
