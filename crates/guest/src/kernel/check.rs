//! Checks every request type, one request at a time, with a random layout: status, length and data
//! have to be right.
//!
//! It works on any device that [`Disk`] drives, and destroys the contents of the range that it
//! uses.

use crate::driver::status_name;
use crate::driver::{Disk, SECTOR, Shuffle, feature, request, status};
use crate::error::{Result, fail};
use crate::rng::Rng;

/// Sectors of the range.
const SECTORS: u64 = 512;
/// Bytes of the largest read or write.
const BYTES_MAX: u64 = 64 << 10;

/// Counts of the answers.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Checked {
    /// Requests made.
    pub requests: u64,
    /// Requests that had to fail.
    pub errors: u64,
    /// Requests that had to be unsupported.
    pub unsupported: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written by OUT.
    pub written_bytes: u64,
}

struct Check<'a> {
    disk: &'a mut Disk,
    rng: Rng,
    serial: &'a str,
    /// First sector of the range, and sectors of a logical block.
    first: u64,
    block: u64,
    /// Contents of the range. `None`: unknown after a discard.
    model: Vec<Option<[u8; SECTOR as usize]>>,
    done: Checked,
}

/// Makes `rounds` requests of each kind. `shuffle`: most descriptors of a request; 0: the usual
/// three.
///
/// # Errors
/// An answer is wrong.
pub fn run(disk: &mut Disk, serial: &str, rounds: u32, shuffle: u16, seed: u32) -> Result<Checked> {
    let block = (u64::from(disk.config().blk_size) / SECTOR).max(1);
    if disk.capacity() < SECTORS {
        return Err(fail!(Usage, "the disk has {} sectors, the check needs {SECTORS}", disk.capacity()));
    }
    if shuffle > 0 {
        for (stream, queue) in disk.split().2.iter_mut().enumerate() {
            let rng = Rng::new(u64::from(seed), 4000 + stream as u64);
            queue.set_shuffle(Shuffle::new(rng, usize::from(shuffle)));
        }
    }
    let first = (disk.capacity() - SECTORS) / block * block;
    let rng = Rng::new(u64::from(seed), 4999);
    let model = vec![None; SECTORS as usize];
    let mut check = Check { disk, rng, serial, first, block, model, done: Checked::default() };
    for round in 0..rounds {
        let q = (round % u32::from(check.disk.queue_count())) as u16;
        check.round(q).map_err(|e| fail!(Verify, "request check, round {round}, seed {seed}: {e}"))?;
    }
    Ok(check.done)
}

impl Check<'_> {
    fn has(&mut self, bit: u64) -> bool {
        self.disk.transport().features() & bit != 0
    }

    fn round(&mut self, q: u16) -> Result<()> {
        if self.has(feature::BLK_RO) {
            self.read(q)?;
            let (at, sectors) = self.range(BYTES_MAX);
            self.expect(
                q,
                request::OUT,
                self.first + at,
                &vec![0; (sectors * SECTOR) as usize],
                status::IOERR,
            )?;
            return self.get_id(q);
        }
        self.write(q)?;
        self.read(q)?;
        self.get_id(q)?;
        if self.has(feature::BLK_FLUSH) {
            self.expect(q, request::FLUSH, 0, &[], status::OK)?;
        }
        self.zeroes(q)?;
        self.discard(q)?;
        self.refused(q)
    }

    /// Returns a random range: first sector, counted from the model's start, and number of sectors.
    fn range(&mut self, bytes_max: u64) -> (u64, u64) {
        let blocks = SECTORS / self.block;
        let at = self.rng.below(blocks);
        let most = (blocks - at).min(bytes_max / SECTOR / self.block).max(1);
        (at * self.block, (1 + self.rng.below(most)) * self.block)
    }

    /// Makes a request with `bytes` in its buffer, and checks its status. Returns the contents of
    /// the buffer afterwards.
    fn expect(&mut self, q: u16, kind: u32, sector: u64, bytes: &[u8], wanted: u8) -> Result<Vec<u8>> {
        self.disk.bounce(q).write(0, bytes);
        let (got, len) = self.disk.request_len(q, kind, sector, bytes.len())?;
        self.done.requests += 1;
        self.done.errors += u64::from(wanted == status::IOERR);
        self.done.unsupported += u64::from(wanted == status::UNSUPP);
        let what = format!("request type {kind}, {} bytes at sector {sector}", bytes.len());
        if got != wanted {
            return Err(fail!(Verify, "{what}: {}, wanted {}", status_name(got), status_name(wanted)));
        }
        let written = match kind {
            request::IN | request::GET_ID => bytes.len() as u32 + 1,
            _ => 1,
        };
        // A request that failed is known to have written only the status. Unwritten bytes may be
        // before it.
        if wanted == status::OK && kind != request::GET_ID && len != written || len > written {
            return Err(fail!(Verify, "{what}: the device says that it wrote {len} bytes, wanted {written}"));
        }
        let mut after = vec![0; bytes.len()];
        self.disk.bounce(q).read(0, &mut after);
        Ok(after)
    }

    fn write(&mut self, q: u16) -> Result<()> {
        let (at, sectors) = self.range(BYTES_MAX);
        let mut bytes = vec![0; (sectors * SECTOR) as usize];
        bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&self.rng.draw().to_le_bytes()));
        self.expect(q, request::OUT, self.first + at, &bytes, status::OK)?;
        self.done.written_bytes += bytes.len() as u64;
        for (i, sector) in bytes.chunks_exact(SECTOR as usize).enumerate() {
            self.model[at as usize + i] = sector.try_into().ok();
        }
        Ok(())
    }

    fn read(&mut self, q: u16) -> Result<()> {
        let (at, sectors) = self.range(BYTES_MAX);
        self.read_at(q, at, sectors)
    }

    fn read_at(&mut self, q: u16, at: u64, sectors: u64) -> Result<()> {
        let filled = vec![0x5a; (sectors * SECTOR) as usize];
        let bytes = self.expect(q, request::IN, self.first + at, &filled, status::OK)?;
        self.done.read_bytes += bytes.len() as u64;
        for (i, found) in bytes.chunks_exact(SECTOR as usize).enumerate() {
            let place = &mut self.model[at as usize + i];
            if place.is_some_and(|known| known != *found) {
                let sector = self.first + at + i as u64;
                return Err(fail!(Verify, "sector {sector} holds something else than was written"));
            }
            // Unknown contents are known after the first read, and must stay the same.
            *place = found.try_into().ok();
        }
        Ok(())
    }

    fn get_id(&mut self, q: u16) -> Result<()> {
        for len in [20, 1 + self.rng.below(19) as usize, 21 + self.rng.below(40) as usize] {
            let mut wanted = [0; 20];
            let serial = self.serial.as_bytes();
            wanted[..serial.len().min(20)].copy_from_slice(&serial[..serial.len().min(20)]);
            let found = self.expect(q, request::GET_ID, 0, &vec![0xcc; len], status::OK)?;
            if self.serial.is_empty() {
                continue;
            }
            if found[..len.min(20)] != wanted[..len.min(20)] {
                let found = String::from_utf8_lossy(&found).into_owned();
                return Err(fail!(Verify, "GET_ID of {len} bytes answered {found:?}, not {:?}", self.serial));
            }
        }
        Ok(())
    }

    /// Returns the bytes of ranges for DISCARD and WRITE_ZEROES.
    fn ranges(ranges: &[(u64, u64)], flags: u32) -> Vec<u8> {
        let one = |&(sector, sectors): &(u64, u64)| {
            [&sector.to_le_bytes()[..], &(sectors as u32).to_le_bytes(), &flags.to_le_bytes()].concat()
        };
        ranges.iter().flat_map(one).collect()
    }

    fn zeroes(&mut self, q: u16) -> Result<()> {
        if !self.has(feature::BLK_WRITE_ZEROES) {
            return Ok(());
        }
        let ranges: Vec<_> = (0..1 + self.rng.below(4)).map(|_| self.range(BYTES_MAX)).collect();
        let absolute: Vec<_> = ranges.iter().map(|r| (self.first + r.0, r.1)).collect();
        let unmap = self.rng.below(2) as u32;
        self.expect(q, request::WRITE_ZEROES, 0, &Self::ranges(&absolute, unmap), status::OK)?;
        for &(at, sectors) in &ranges {
            self.model[at as usize..(at + sectors) as usize].fill(Some([0; SECTOR as usize]));
        }
        let (at, sectors) = ranges[0];
        self.read_at(q, at, sectors)?;
        self.expect(q, request::WRITE_ZEROES, 0, &Self::ranges(&absolute, 0x10), status::UNSUPP)?;
        let beyond = (self.disk.capacity() - 1, 2);
        self.expect(q, request::WRITE_ZEROES, 0, &Self::ranges(&[beyond], 0), status::IOERR).map(drop)
    }

    fn discard(&mut self, q: u16) -> Result<()> {
        if !self.has(feature::BLK_DISCARD) {
            return Ok(());
        }
        let (at, sectors) = self.range(BYTES_MAX);
        self.expect(q, request::DISCARD, 0, &Self::ranges(&[(self.first + at, sectors)], 0), status::OK)?;
        self.model[at as usize..(at + sectors) as usize].fill(None);
        self.read_at(q, at, sectors)?;
        // The unmap flag is invalid for discards.
        let flagged = Self::ranges(&[(self.first + at, sectors)], 1);
        self.expect(q, request::DISCARD, 0, &flagged, status::UNSUPP).map(drop)
    }

    /// Makes requests that the device has to refuse.
    fn refused(&mut self, q: u16) -> Result<()> {
        let end = self.disk.capacity();
        let two = vec![0; 2 * (self.block * SECTOR) as usize];
        for kind in [request::IN, request::OUT] {
            for sector in [end - self.block, end, end + 1 + self.rng.below(1 << 40), u64::MAX, u64::MAX / 512]
            {
                self.expect(q, kind, sector, &two, status::IOERR)?;
            }
            let odd = vec![0; 1 + self.rng.below(511) as usize];
            self.expect(q, kind, self.first, &odd, status::IOERR)?;
        }
        for kind in [2, 3, 5, 99, 0x8000_0001, 0xffff_ffff] {
            self.expect(q, kind, 0, &[0; 24], status::UNSUPP)?;
        }
        Ok(())
    }
}
