#!/bin/sh
# @xen-orchestra/qcow2 1.3.1: the flags of an L2 entry are ignored, and stored bytes are the disk.
#
# Expected: a compressed cluster is decompressed or refused, and a cluster that is marked "reads as
# zeroes" gives zeroes. Seen with @xen-orchestra/qcow2 1.3.1: an entry is only an offset. For a
# compressed cluster the reader returns 64 KiB of the file, from the offset rounded down to 32
# bytes: deflate data, then what follows them. For a cluster of zeroes that keeps its offset it
# returns the data that were there before. No error tells so. Images for it need a copy without
# compression and without such clusters (qemu-img convert). The package also imports
# @vates/read-chunk and does not list it.
#
# Output, with node 20:
#     compressed, "A" repeated: edc181000000008020b6fda516a90a00
#     zeroes over "o": 6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f
#
# Needs node and npm, qemu-img, and Python 3. Fails if the data are right, or otherwise wrong.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
npm install --prefix "$dir" --silent --ignore-scripts --no-audit --no-fund --save-exact \
    @xen-orchestra/qcow2@1.3.1 @xen-orchestra/disk-transform@1.3.3 \
    @vates/read-chunk@1.2.1 @vates/generator-toolbox@1.1.3 isutf8@4.0.1 >"$dir/npm.log"
head -c 128K /dev/zero | tr '\0' A >disk.raw
qemu-img convert -c -f raw -O qcow2 disk.raw compressed.qcow2
qemu-img create -q -f qcow2 zeroes.qcow2 128k
qemu-io -c 'write -q -P 0x6f 0 64k' -c 'write -q -z 0 64k' zeroes.qcow2
qemu-io -c 'read -q -P 0 0 64k' zeroes.qcow2
cat >read.mjs <<'JS'
import { closeSync, openSync, readSync } from 'node:fs'
import { inflateRawSync } from 'node:zlib'
import { QCowAccessor } from '@xen-orchestra/qcow2'

const files = {
  openFile: async path => openSync(path, 'r'),
  read: async (fd, buffer, position) => ({ bytesRead: readSync(fd, buffer, 0, buffer.length, position), buffer }),
  closeFile: async fd => closeSync(fd),
}
const first = async path => {
  const disk = new QCowAccessor(files, path)
  await disk.init()
  const { data } = await disk.readBlock(0)
  await disk.close()
  return data
}
const start = data => data.subarray(0, 16).toString('hex')

const compressed = await first('compressed.qcow2')
console.log(`compressed, "A" repeated: ${start(compressed)}`)
const zeroes = await first('zeroes.qcow2')
console.log(`zeroes over "o": ${start(zeroes)}`)
const stored = inflateRawSync(compressed).equals(Buffer.alloc(65536, 'A'))
process.exitCode = stored && zeroes.equals(Buffer.alloc(65536, 'o')) ? 0 : 1
JS
node read.mjs
