//! virtio-blk behind a socket: features, configuration space, queues (Virtio 1.3, section 5.2).

mod queue;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use virtio::blk::{
    BLK_CONFIG_WRITEBACK_AT, BlkConfig, SECTOR_SIZE, VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE,
    VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio::features::{
    VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1, VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, bit,
};
use vshunt_block::Disk;
use vshunt_engine::{LimitCell, Queue};
use vshunt_types::spec::Cache;
use vshunt_virtqueue::RingParts;

use self::queue::{BlkQueue, BlkShared};
pub use self::queue::{REQUEST_BYTES_MAX, SERIAL_MAX};
use super::{ConfigChange, Device, RingPlace};
use vshunt_types::convert::{copy_start, low_u32};

/// Data segments of one request: the usual descriptor table of 128, without header and status.
const SEG_MAX: u32 = 126;
/// Largest DISCARD and WRITE_ZEROES, sectors: 2 GiB, so that one request does not occupy the ring
/// of its worker for long.
pub const ZERO_SECTORS_MAX: u32 = 1 << 22;

/// Bytes of a sector.
const SECTOR_BYTES: u32 = low_u32(SECTOR_SIZE);

/// Features that concern the configuration space only.
const CONFIG_ONLY: u64 = bit(VIRTIO_BLK_F_BLK_SIZE)
    | bit(VIRTIO_BLK_F_TOPOLOGY)
    | bit(VIRTIO_BLK_F_SEG_MAX)
    | bit(VIRTIO_BLK_F_MQ)
    | bit(VIRTIO_BLK_F_RO);

/// Names of the features of a disk.
const NAMES: &[(u32, &str)] = &[
    (VIRTIO_BLK_F_SEG_MAX, "SEG_MAX"),
    (VIRTIO_BLK_F_RO, "RO"),
    (VIRTIO_BLK_F_BLK_SIZE, "BLK_SIZE"),
    (VIRTIO_BLK_F_FLUSH, "FLUSH"),
    (VIRTIO_BLK_F_TOPOLOGY, "TOPOLOGY"),
    (VIRTIO_BLK_F_CONFIG_WCE, "CONFIG_WCE"),
    (VIRTIO_BLK_F_MQ, "MQ"),
    (VIRTIO_BLK_F_DISCARD, "DISCARD"),
    (VIRTIO_BLK_F_WRITE_ZEROES, "WRITE_ZEROES"),
];

/// A disk as a virtio-blk device.
pub struct BlkDevice {
    disk: Arc<Disk>,
    queues: u16,
    block_size: u32,
    readonly: bool,
    shared: Arc<BlkShared>,
    /// Features that the server of its rings has.
    offered: u64,
    /// Negotiated features. Together with `writeback` they decide how writes complete.
    features: AtomicU64,
    /// The `writeback` byte of the configuration space: 1 write-back, 0 write-through.
    writeback: AtomicBool,
    /// Whether the guest wrote that byte since this daemon started.
    writeback_written: AtomicBool,
}

impl BlkDevice {
    /// Makes a device of `queues` virtqueues. `block_size` in bytes; 0 takes the block size of the
    /// disk.
    pub fn new(disk: Arc<Disk>, queues: u16, block_size: u32, serial: &str, readonly: bool) -> Self {
        Self::limited(disk, queues, block_size, serial, readonly, Arc::default())
    }

    /// Makes a device like [`new`](Self::new), whose requests wait for the limits in `limits`.
    pub fn limited(
        disk: Arc<Disk>,
        queues: u16,
        block_size: u32,
        serial: &str,
        readonly: bool,
        limits: Arc<LimitCell>,
    ) -> Self {
        let mut id = [0; SERIAL_MAX];
        copy_start(&mut id, serial.as_bytes());
        let readonly = readonly || disk.readonly();
        let discard = u32::try_from(disk.limits().max_discard_bytes / SECTOR_SIZE).ok();
        let shared = BlkShared {
            disk: disk.clone(),
            serial: id,
            readonly,
            writethrough: AtomicBool::new(true),
            writethrough_until_flush: AtomicBool::new(false),
            max_zero_sectors: ZERO_SECTORS_MAX,
            max_discard_sectors: discard.unwrap_or(ZERO_SECTORS_MAX).min(ZERO_SECTORS_MAX),
            limits,
        };
        let block_size = if block_size == 0 { disk.limits().block_size } else { block_size };
        let device = Self {
            queues,
            block_size,
            readonly,
            shared: Arc::new(shared),
            offered: u64::MAX,
            features: AtomicU64::new(0),
            writeback: AtomicBool::new(true),
            writeback_written: AtomicBool::new(false),
            disk,
        };
        device.reset();
        device
    }

    /// Changes the device to one whose requests the kernel serves, with these features.
    pub fn served_by_kernel(mut self, features: u64) -> Self {
        self.offered = features | CONFIG_ONLY;
        self
    }

    /// Returns whether writes of the guest are refused.
    pub fn readonly(&self) -> bool {
        self.readonly
    }

    /// Decides again how writes complete.
    fn update(&self) {
        let features = self.features.load(Relaxed);
        // Virtio 1.3, 5.2.5: without FLUSH, or with CONFIG_WCE and writeback = 0, a completed write
        // must be stable.
        let switched_off = features & bit(VIRTIO_BLK_F_CONFIG_WCE) != 0 && !self.writeback.load(Relaxed);
        let through = features & bit(VIRTIO_BLK_F_FLUSH) == 0
            || switched_off
            || self.disk.cache() == Cache::Writethrough;
        if through {
            self.shared.writethrough_until_flush.store(false, Relaxed);
        }
        let until_flush = self.shared.writethrough_until_flush.load(Relaxed)
            && features & bit(VIRTIO_BLK_F_CONFIG_WCE) != 0;
        self.shared
            .writethrough
            .store((through || until_flush) && self.disk.cache() != Cache::Unsafe, Relaxed);
    }
}

impl Device for BlkDevice {
    fn features(&self) -> u64 {
        let limits = self.disk.limits();
        let mut features = bit(VIRTIO_F_VERSION_1)
            | bit(VIRTIO_RING_F_INDIRECT_DESC)
            | bit(VIRTIO_RING_F_EVENT_IDX)
            | bit(VIRTIO_F_RING_PACKED)
            | bit(VIRTIO_BLK_F_BLK_SIZE)
            | bit(VIRTIO_BLK_F_TOPOLOGY)
            | bit(VIRTIO_BLK_F_SEG_MAX);
        if self.disk.cache() != Cache::Writethrough {
            features |= bit(VIRTIO_BLK_F_FLUSH);
        }
        if self.queues > 1 {
            features |= bit(VIRTIO_BLK_F_MQ);
        }
        if self.readonly {
            features |= bit(VIRTIO_BLK_F_RO);
        } else {
            if self.disk.cache() == Cache::Writeback {
                features |= bit(VIRTIO_BLK_F_CONFIG_WCE);
            }
            if limits.can_discard {
                features |= bit(VIRTIO_BLK_F_DISCARD);
            }
            if limits.can_zero {
                features |= bit(VIRTIO_BLK_F_WRITE_ZEROES);
            }
        }
        features & self.offered
    }

    fn negotiated(&self, features: u64) -> Result<(), String> {
        self.features.store(features, Relaxed);
        self.update();
        Ok(())
    }

    fn reset(&self) {
        self.writeback.store(self.disk.cache() != Cache::Writethrough, Relaxed);
        self.update();
    }

    fn feature_names(&self) -> &'static [(u32, &'static str)] {
        NAMES
    }

    fn config(&self) -> Vec<u8> {
        let limits = self.disk.limits();
        // The limits of the disk are in bytes. Those of the guest are in logical blocks, whose size
        // the export may have raised (Virtio 1.3, 5.2.4).
        let physical = limits.block_size << limits.physical_block_exp;
        let mut config = BlkConfig {
            capacity: self.disk.size_bytes() / SECTOR_SIZE,
            seg_max: SEG_MAX,
            blk_size: self.block_size,
            physical_block_exp: (physical / self.block_size).max(1).ilog2().try_into().unwrap_or(0),
            min_io_size: (limits.min_io / self.block_size).try_into().unwrap_or(0),
            opt_io_size: limits.opt_io / self.block_size,
            writeback: self.writeback.load(Relaxed).into(),
            num_queues: self.queues,
            ..BlkConfig::default()
        };
        if limits.can_discard {
            config.max_discard_sectors = self.shared.max_discard_sectors;
            config.max_discard_seg = 1;
            config.discard_sector_alignment = (limits.discard_align / SECTOR_BYTES).max(1);
        }
        if limits.can_zero {
            config.max_write_zeroes_sectors = ZERO_SECTORS_MAX;
            config.max_write_zeroes_seg = 1;
            config.write_zeroes_may_unmap = 1;
        }
        config.as_bytes().to_vec()
    }

    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<ConfigChange, String> {
        let agreed = self.features.load(Relaxed) & bit(VIRTIO_BLK_F_CONFIG_WCE) != 0;
        let (true, &[writeback]) = (agreed && offset as usize == BLK_CONFIG_WRITEBACK_AT, bytes) else {
            return Err(format!(
                "the guest writes {} bytes at {offset} of the configuration space; only writeback is writable",
                bytes.len()
            ));
        };
        let writeback = writeback != 0;
        self.writeback_written.store(true, Relaxed);
        self.shared.writethrough_until_flush.store(false, Relaxed);
        let was = self.writeback.swap(writeback, Relaxed);
        self.update();
        // Writes before the switch, and writes in flight, are not stable yet, and the guest sends
        // no more flushes.
        Ok(if was && !writeback { ConfigChange::Settle } else { ConfigChange::Done })
    }

    fn settle(&self) -> Result<(), String> {
        self.disk.sync().map_err(|e| {
            self.writeback.store(true, Relaxed);
            self.update();
            format!("cannot flush what was written before the cache was switched off: {e}")
        })
    }

    fn outlives_daemon(&self) -> bool {
        self.disk.survives_kill()
    }

    fn resumed(&self) -> Result<(), String> {
        if self.disk.lost_writes() {
            return Err(
                "its disk was not closed, and writes that the guest knows as completed may be lost: \
                        restart the guest, and check its file systems"
                    .to_owned(),
            );
        }
        if !self.writeback_written.load(Relaxed) {
            self.shared.writethrough_until_flush.store(true, Relaxed);
            self.update();
        }
        Ok(())
    }

    fn rings(&self) -> u16 {
        self.queues
    }

    fn place(&self, ring: u16) -> Option<RingPlace> {
        (ring < self.queues).then_some(RingPlace { queue: ring, nth: 0 })
    }

    fn queue(&self, place: RingPlace, parts: RingParts, _others: Option<Box<dyn Queue>>) -> Box<dyn Queue> {
        Box::new(BlkQueue::new(parts, self.shared.clone(), place.queue))
    }
}

#[cfg(test)]
mod tests {
    use vshunt_types::spec::{DiskSpec, Format};

    use super::*;

    fn device(cache: Cache) -> BlkDevice {
        let spec = DiskSpec {
            name: "d".into(),
            format: Some(Format::Ram),
            size: Some(1 << 20),
            cache,
            ..DiskSpec::default()
        };
        BlkDevice::new(Disk::open(&spec).unwrap(), 1, 0, "", false)
    }

    const BOTH: u64 = bit(VIRTIO_BLK_F_FLUSH) | bit(VIRTIO_BLK_F_CONFIG_WCE);

    fn through(device: &BlkDevice) -> bool {
        device.shared.writethrough.load(Relaxed)
    }

    #[test]
    fn what_was_agreed_on_decides_how_writes_complete() {
        let device = device(Cache::Writeback);
        assert!(through(&device), "no guest yet");
        for (features, expected) in [(BOTH, false), (bit(VIRTIO_BLK_F_FLUSH), false), (0, true)] {
            device.negotiated(features).unwrap();
            assert_eq!(through(&device), expected, "{features:#x}");
        }
        let at = BLK_CONFIG_WRITEBACK_AT as u32;
        assert!(device.set_config(at, &[0]).is_err(), "not agreed on");
        device.negotiated(BOTH).unwrap();
        assert_eq!(device.set_config(at, &[0]), Ok(ConfigChange::Settle));
        assert!(through(&device));
        assert_eq!(device.set_config(at, &[0]), Ok(ConfigChange::Done));
        assert_eq!(device.set_config(at, &[1]), Ok(ConfigChange::Done));
        assert!(!through(&device));
    }

    #[test]
    fn a_daemon_that_takes_over_a_guest_writes_through_until_it_knows_better() {
        let device = device(Cache::Writeback);
        device.negotiated(BOTH).unwrap();
        device.resumed().unwrap();
        assert!(through(&device));
        assert_eq!(device.set_config(BLK_CONFIG_WRITEBACK_AT as u32, &[1]), Ok(ConfigChange::Done));
        assert!(!through(&device), "the guest chose write-back");
        device.resumed().unwrap();
        assert!(!through(&device), "the choice is kept");
    }

    #[test]
    fn a_cache_that_is_not_there_is_not_offered() {
        assert_eq!(device(Cache::Writethrough).features() & BOTH, 0);
        assert_eq!(device(Cache::Writeback).features() & BOTH, BOTH);
        let device = device(Cache::Unsafe);
        assert_eq!(device.features() & BOTH, bit(VIRTIO_BLK_F_FLUSH));
        device.negotiated(0).unwrap();
        assert!(!through(&device));
    }
}
