# shellcheck shell=bash
# What the scripts share; sourced after `set -euo pipefail`.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CARGO=${CARGO:-cargo}
# shellcheck disable=SC2034
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
CACHE=${VSHUNT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vshunt}
PATH=$PATH:/usr/sbin:/sbin:$HOME/.cargo/bin:$CACHE/tools/bin:$CACHE/tools/python/bin

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# A heading; bold on a terminal.
heading() {
    if [ -t 1 ]; then printf '\n\033[1m%s\033[0m\n' "$*"; else printf '\n%s\n' "$*"; fi
}

# shellcheck disable=SC2034
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' "$ROOT/Cargo.toml")

have() { command -v "$1" >/dev/null 2>&1; }

debian_root() { [ "$(id -u)" = 0 ] && have apt-get && have dpkg; }

# Prints the Python that has pytest with its plugins, for the tests: the system's, or the virtual
# environment of scripts/packages.
pytest_python() {
    local python
    for python in python3 /usr/bin/python3 "$CACHE/tools/python/bin/python3"; do
        if have "$python" && "$python" -c 'import pytest, pytest_timeout, xdist' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    return 1
}

# The date of the files in packages, in seconds: SOURCE_DATE_EPOCH, or that of the last commit.
source_date() {
    if [ -n "${SOURCE_DATE_EPOCH:-}" ]; then
        echo "$SOURCE_DATE_EPOCH"
    else
        git -C "$ROOT" -c safe.directory="$ROOT" log -1 --format=%ct 2>/dev/null || stat -c %Y "$ROOT/CHANGELOG.md"
    fi
}

# Copies what packages are made of to FOLDER.
copy_tree() { # FOLDER [TAR ARGUMENTS…]
    local to=$1
    shift
    tar -C "$ROOT" -c --exclude=./target --exclude=./.git --exclude=./docs/book --exclude=__pycache__ "$@" . | tar -x -C "$to"
}

# Packs the folder NAME of FOLDER into FILE, so that the same files give the same bytes.
pack() { # FILE FOLDER NAME
    LC_ALL=C tar --sort=name --format=gnu --owner=0 --group=0 --numeric-owner --mtime="@$(source_date)" -C "$2" -c "$3" | gzip -n -9 >"$1"
}

have_toolchain() { have rustup && rustup toolchain list 2>/dev/null | grep -q "^$1"; }

# TERM for each process id given, KILL for what does not end within three seconds. Only for our own
# children.
end_children() {
    local pid n
    for pid in "$@"; do kill -TERM "$pid" 2>/dev/null || true; done
    for pid in "$@"; do
        for ((n = 0; n < 30; n++)); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
}
