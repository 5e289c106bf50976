#!/usr/bin/env bash
# Finds, or sets up, the programs that vshunt is measured against: QEMU's storage daemon, and fio
# with its libblkio engine (a vhost-user-blk client that neither side wrote).
#
#   bench/peers.sh      into ${VSHUNT_PEERS:-/var/tmp/vshunt-peers}
#
# Root on Debian: a chroot of Debian's newest suite, from packages only, through the mirror in this
# machine's own apt sources. About 2 GB and ten minutes the first time; a moment later on (the
# mounts again). Anyone else, or with VSHUNT_NO_INSTALL=1 and no chroot yet: what is in PATH, and a
# note for what is not.
#
# Called by run.py. stdout is for it, `key=value` a line: root (the chroot; empty: none), work (a
# folder with the same path inside of the chroot and outside), qsd, fio (program as seen from root;
# empty: not there), nbdkit (outside of it), testpmd (a path outside of it) or testpmd_in_root,
# cloud_net (outside of it), and note (any number). Everything else goes to stderr. A failed set-up
# is a note, not a failure.
set -euo pipefail
exec 3>&1 1>&2

readonly dir=${VSHUNT_PEERS:-/var/tmp/vshunt-peers}
readonly root=$dir/sid
readonly work=$dir/work
readonly chroot_fio=/opt/fio/bin/fio

say() { printf '%s\n' "$1" >&3; }
in_root() { chroot "$1" env DEBIAN_FRONTEND=noninteractive LC_ALL=C bash -euc "$2"; }

mirror() {
  local files
  files=$(ls /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null || true)
  # shellcheck disable=SC2086 # one file a word
  sed -nE 's/^URIs: *(\S+).*/\1/p; s/^deb (\[[^]]*\] )?(\S+) .*/\2/p' $files | sed -n '/debian\/\?$/{p;q}'
}

# A base system appears under its name only when it is whole, so that a set-up cut short starts
# again.
make_base() {
  local from part=$root.part
  from=$(mirror)
  [ -n "$from" ] || { echo "no Debian mirror in this machine's apt sources"; return 1; }
  if ! command -v debootstrap >/dev/null; then
    apt-get install -y -q --no-install-recommends debootstrap || return 1
  fi
  mkdir -p "$dir" && rm -rf --one-file-system "$part" || return 1
  debootstrap --variant=minbase sid "$part" "$from" || return 1
  rm -f "$part/etc/apt/sources.list"
  printf '%s\n' 'Types: deb deb-src' "URIs: $from" 'Suites: sid' 'Components: main' 'Check-Valid-Until: no' \
    'Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg' >"$part/etc/apt/sources.list.d/debian.sources" || return 1
  mv "$part" "$root"
}

# /dev brings /dev/shm along: images on tmpfs have the same path on both sides, as those in $work
# have.
make_mounts() {
  local m
  for m in proc dev sys; do
    mountpoint -q "$root/$m" && continue
    mount --rbind "/$m" "$root/$m" && mount --make-rslave "$root/$m" || return 1
  done
  mkdir -p "$work" "$root$work" || return 1
  mountpoint -q "$root$work" && return
  mountpoint -q "$work" || mount --bind "$work" "$work" || return 1
  mount --make-shared "$work" && mount --bind "$work" "$root$work"
}

make_programs() {
  cp /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null || true
  # shellcheck disable=SC2016 # expanded inside
  in_root "$root" 'apt-get update -q
    apt-get install -y -q --no-install-recommends qemu-utils qemu-system-common libblkio-dev \
      build-essential dpkg-dev pkgconf libaio-dev zlib1g-dev
    rm -rf /usr/src/fio; mkdir -p /usr/src/fio; cd /usr/src/fio
    apt-get source -q --tar-only --download-only fio
    tar -xf fio_*.orig.tar.*; cd fio-*/
    ./configure --prefix=/opt/fio >/tmp/fio-configure.log
    make -j"$(nproc)" >/tmp/fio-make.log 2>&1 || { tail -20 /tmp/fio-make.log >&2; exit 1; }
    make install >/dev/null'
}

has_blkio() { "$@" --enghelp=libblkio >/dev/null 2>&1; }

# 0: the chroot is there and works.
use_chroot() {
  [ "$(id -u)" = 0 ] || { [ ! -d "$root" ] || say "note=not root: the peers in $root cannot be used"; return 1; }
  if [ ! -x "$root$chroot_fio" ]; then
    [ "${VSHUNT_NO_INSTALL:-}" != 1 ] || { say "note=VSHUNT_NO_INSTALL=1: nothing set up in $dir"; return 1; }
    if [ ! -e /etc/debian_version ] || ! command -v apt-get >/dev/null; then
      say "note=not Debian: peers are not set up here, only looked for in PATH"
      return 1
    fi
    echo "bench: setting up the peers in $dir: about ten minutes and 2 GB, once"
    [ -e "$root/etc/debian_version" ] || make_base || { say "note=set-up failed: no base system in $root"; return 1; }
  fi
  make_mounts || { say "note=set-up failed: cannot mount /proc, /dev, /sys or $work below $root"; return 1; }
  [ -x "$root$chroot_fio" ] || make_programs || { say "note=set-up failed: packages or fio's build, in $root"; return 1; }
  has_blkio chroot "$root" "$chroot_fio" || { say "note=fio in $root has no libblkio engine; remove $root to set it up again"; return 1; }
}

# With VSHUNT_PEERS_NET=1: cloud-hypervisor's network server, if it was built. Nothing here builds
# it.
use_cloud_net() {
  local program=${VSHUNT_CH_NET:-$dir/bin/vhost_user_net}
  [ "${VSHUNT_PEERS_NET:-}" = 1 ] || return 0
  if [ -x "$program" ]; then
    say "cloud_net=$program"
  elif [ -n "${VSHUNT_CH_NET:-}" ]; then
    say "note=VSHUNT_CH_NET=$program is no program that can be run"
  fi
}

# With VSHUNT_PEERS_NET=1, for the cases about networks: dpdk-testpmd from PATH, or else from the
# chroot ($1; empty: none).
use_testpmd() {
  [ "${VSHUNT_PEERS_NET:-}" = 1 ] || return 0
  if command -v dpdk-testpmd >/dev/null; then say "testpmd=$(command -v dpdk-testpmd)"; return 0; fi
  [ -n "$1" ] || return 0
  if [ ! -x "$1/usr/bin/dpdk-testpmd" ] && [ "${VSHUNT_NO_INSTALL:-}" != 1 ]; then
    echo "bench: setting up DPDK in $1"
    in_root "$1" 'apt-get update -q
      apt-get install -y -q --no-install-recommends dpdk-dev librte-meta-bus librte-meta-mempool librte-meta-net' ||
      say "note=set-up failed: DPDK, in $1"
  fi
  [ ! -x "$1/usr/bin/dpdk-testpmd" ] || say "testpmd_in_root=dpdk-testpmd"
}

use_cloud_net
if command -v nbdkit >/dev/null; then say "nbdkit=$(command -v nbdkit)"; fi
if use_chroot; then
  say "root=$root"
  say "work=$work"
  say "fio=$chroot_fio"
  use_testpmd "$root"
  if in_root "$root" 'command -v qemu-storage-daemon' >/dev/null; then say "qsd=qemu-storage-daemon"; fi
  exit 0
fi
say "root="
use_testpmd ""
mkdir -p "$work" 2>/dev/null && [ -w "$work" ] && say "work=$work"
if command -v qemu-storage-daemon >/dev/null; then say "qsd=qemu-storage-daemon"; fi
if command -v fio >/dev/null; then say "fio=$(command -v fio)"; fi
exit 0
