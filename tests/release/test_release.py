"""`make release` in a repository of its own: what it refuses, and what it leaves behind. Nothing is built."""

import json
import os
import re

import pytest
import rig as r

HEADING = "# Changelog\n\n## Unreleased\n\n"
WORK = HEADING + "- A change that users see.\n\n## 0.0.9 (2020-01-01)\n\n- An older one.\n"


class Repository:
    """A repository with the files of this tree, on the branch main."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        r.run(["bash", "-euc", '. "$1/scripts/lib.sh"; copy_tree "$2"', "copy", r.ROOT, folder])
        self.write("CHANGELOG.md", WORK)
        self.git("init", "-q", "-b", "main")
        for key, value in (("user.name", "A Tester"), ("user.email", "tester@localhost"), ("commit.gpgsign", "false"), ("tag.gpgsign", "false")):
            self.git("config", key, value)
        self.commit()
        self.first = self.head()
        self.old = re.search(r'^version = "(.*)"', self.read("Cargo.toml"), re.MULTILINE)[1]
        major, minor, _ = self.old.split(".")
        self.new = f"{major}.{int(minor) + 1}.0"

    def read(self, name):
        return (self.folder / name).read_text(encoding="utf-8")

    def write(self, name, text):
        (self.folder / name).write_text(text, encoding="utf-8")

    def git(self, *arguments):
        # Settings of this machine, such as a key, are not those of the test.
        env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        return r.run(["git", "-C", self.folder, *arguments], env=env).stdout.strip()

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "state")

    def head(self):
        return self.git("rev-parse", "HEAD")

    def release(self, *arguments):
        env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        return r.run([self.folder / "scripts/release", *arguments], check=False, env=env)

    def refuses(self, *words, arguments=None):
        """A release ends with one sentence that has these words, and changes nothing."""
        before = self.head(), self.git("status", "--porcelain"), self.git("tag")
        done = self.release(*(arguments or ("--no-build", self.new)))
        r.require(done.returncode == 1, f"ended with {done.returncode}: {done.stdout}{done.stderr}")
        text = done.stderr.strip()
        r.require(text.startswith("release: ") and len(text.splitlines()) == 1, f"not one sentence: {text}")
        for word in words:
            r.require(word in text, f"{word!r} is not in: {text}")
        r.require((self.head(), self.git("status", "--porcelain"), self.git("tag")) == before, "something was changed")

    def reset(self):
        self.git("checkout", "-q", "main")
        self.git("reset", "-q", "--hard", self.first)


@pytest.fixture(scope="module")
def repository(rig):
    r.tool("git", "git")
    return Repository(rig.dir / "tree")


def test_dry_run_changes_nothing(repository):
    done = repository.release("--dry-run", repository.new)
    r.require(done.returncode == 0, done.stderr)
    for word in (f"{repository.old} -> {repository.new}", "A change that users see", f"v{repository.new}", "SHA256SUMS"):
        r.require(word in done.stdout, f"{word} is not in: {done.stdout}")
    r.require("An older one" not in done.stdout, done.stdout)
    r.require(repository.head() == repository.first and not repository.git("status", "--porcelain") and not repository.git("tag"), "changed")


def test_refuses_with_a_remedy(repository):
    new, old = repository.new, repository.old
    for arguments, words in (
        ((), ("no version is given", "make release VERSION=", old)),
        (("--no-build",), ("no version is given",)),
        (("0.2",), ('"0.2" is no version', "three numbers")),
        (("v0.2.0",), ("is no version",)),
        (("--no-build", old), ("is not higher than", "choose a higher version")),
        (("--dry-run", "0.0.1"), ("is not higher than",)),
        (("--push", new), ("unknown option --push",)),
        (("--build-only", new), ("is not", f"git checkout v{new}")),
    ):
        repository.refuses(*words, arguments=arguments or ("",))

    repository.write("README.md", "changed\n")
    repository.refuses("has changes", "commit them")
    repository.reset()

    repository.git("checkout", "-q", "-b", "side")
    repository.refuses("this is side", "git checkout main")
    repository.git("checkout", "-q", "--detach")
    repository.refuses("this is no branch", "git checkout main")
    repository.reset()

    for text, words in ((HEADING, ('"Unreleased"', "is empty")), ("# Changelog\n", ('no section "## Unreleased"',))):
        repository.write("CHANGELOG.md", text)
        repository.commit()
        repository.refuses(*words)
        repository.reset()

    repository.git("tag", f"v{new}")
    repository.refuses(f"the tag v{new} exists", "higher version")
    repository.git("tag", "-d", f"v{new}")


def test_failure_leaves_the_tree(repository):
    """A commit that git refuses takes back what was written."""
    hook = repository.folder / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho no >&2\nexit 1\n")
    hook.chmod(0o755)
    done = repository.release("--no-build", repository.new)
    hook.unlink()
    r.require(done.returncode != 0, "the commit succeeded")
    r.require(repository.head() == repository.first and not repository.git("status", "--porcelain") and not repository.git("tag"), "changed")


def test_sets_the_version_and_tags(repository):
    new = repository.new
    done = repository.release("--no-build", new)
    r.require(done.returncode == 0, done.stderr)
    r.require("is not signed" in done.stdout and f"git push origin main v{new}" in done.stdout, done.stdout)
    r.require(not repository.git("status", "--porcelain"), "the tree is not clean")
    r.require(repository.git("cat-file", "-t", f"v{new}") == "tag", "the tag is not annotated")
    r.require(repository.git("rev-parse", f"v{new}^{{commit}}") == repository.head(), "the tag is not on the new commit")
    r.require(repository.git("log", "-1", "--format=%s") == f"release: {new}", "the subject differs")
    changed = repository.git("diff", "--name-only", repository.first, "HEAD").split()
    r.require(changed == ["CHANGELOG.md", "Cargo.lock", "Cargo.toml", "packaging/rpm/vshunt.spec"], f"changed: {changed}")

    changelog = repository.read("CHANGELOG.md")
    r.require(re.match(rf"# Changelog\n\n## Unreleased\n\n## {re.escape(new)} \(\d{{4}}-\d\d-\d\d\)\n\n- A change", changelog), changelog)
    # Cargo refuses crates that want another version of each other, and a lock file that is behind.
    target = f"{os.uname().machine}-unknown-linux-gnu"
    argv = [os.environ.get("CARGO", "cargo"), "metadata", "--locked", "--offline", "--filter-platform", target, "--format-version", "1"]
    metadata = json.loads(r.run(argv, cwd=repository.folder).stdout)
    versions = {package["name"]: package["version"] for package in metadata["packages"] if package["source"] is None}
    r.require(set(versions.values()) == {new}, f"versions: {versions}")
    r.require(f'version = "{repository.old}"' not in repository.read("Cargo.toml"), "Cargo.toml has the old version")
    r.require(re.search(rf"^Version: +{re.escape(new)}$", repository.read("packaging/rpm/vshunt.spec"), re.MULTILINE), "the spec has another version")
    # Nothing but versions of the workspace differs in the lock file.
    lines = [line for line in repository.git("diff", "-U0", repository.first, "HEAD", "--", "Cargo.lock").splitlines() if line[0] in "+-"]
    expected = {f'-version = "{repository.old}"', f'+version = "{new}"'}
    r.require({line for line in lines if line[:3] not in ("+++", "---")} == expected, f"Cargo.lock: {lines}")

    repository.refuses("is empty", arguments=("--dry-run", f"{new[:-1]}1"))


# In the place of the whole Makefile: targets that make a file of what they are given, and the call
# of the script.
MAKEFILE = """\
release: ; scripts/release --build-only $(VERSION)
deb: ; mkdir -p target/deb && echo 'deb "$(VERSION)"' >target/deb/one.deb
rpm: ; mkdir -p target/rpm && echo 'rpm "$(VERSION)"' >target/rpm/one.rpm
static: ; mkdir -p target/static && echo 'static "$(VERSION)"' | tee target/static/one.tar.gz >target/static/one.cdx.json
"""


def test_collects_files_and_sums(repository):
    """The files of all packages are in one folder, with their sums. The version of the release is not passed on: the kernel module's
    Makefile has a variable of this name."""
    repository.reset()
    repository.write("Makefile", MAKEFILE)
    repository.commit()
    repository.git("tag", "v9.0.0")
    env = {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}
    r.run(["make", "-C", repository.folder, "release", "VERSION=9.0.0"], env=env)
    folder = repository.folder / "target/release-9.0.0"
    names = ["one.cdx.json", "one.deb", "one.rpm", "one.tar.gz"]
    r.require(sorted(p.name for p in folder.iterdir()) == ["SHA256SUMS", *names], f"the files are {list(folder.iterdir())}")
    r.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder)
    for name in names:
        r.require('""' in (folder / name).read_text(encoding="utf-8"), f"the version of the release came to {name}")
