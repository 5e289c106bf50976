//! The life cycle of a connection: it negotiates, and passes memory and rings to the server. After
//! the death of the server it does the same again, with the in-flight region of the first server.
//!
//! The order of the messages is QEMU's for vhost-user-blk. It runs on the thread that owns the
//! device, never on a load thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::channel::BackendChannel;
use super::config::{CONFIG_LEN, Config, NET_CONFIG_LEN, NetConfig, feature};
use super::memory::Memory;
use super::wire::{Code, Payload, Wire, protocol, read_u32, read_u64};
use super::{Class, Options, RingSetup};
use crate::error::{Kind, Result, fail};

/// Device status bits (virtio 1.3, 2.1).
const ACKNOWLEDGE: u64 = 1;
const DRIVER: u64 = 2;
const DRIVER_OK: u64 = 4;
const FEATURES_OK: u64 = 8;

/// Interval between attempts to connect to the socket of a server that died.
const RETRY: Duration = Duration::from_millis(20);

/// The in-flight region, in which a new server finds the requests of the previous one.
#[derive(Debug)]
pub struct InflightRegion {
    /// Size in bytes.
    pub size: u64,
    /// Offset in the file.
    pub offset: u64,
    /// The file.
    pub fd: OwnedFd,
}

/// A negotiated connection.
#[derive(Debug)]
pub struct Session {
    wire: Wire,
    path: PathBuf,
    options: Options,
    features: u64,
    protocol: u64,
    max_queues: u16,
    config: Config,
    device: Option<NetConfig>,
    channel: Option<BackendChannel>,
    inflight: Option<InflightRegion>,
}

impl Session {
    /// Connects and negotiates. [`Session::start`] sets memory and rings.
    pub fn open(path: PathBuf, options: &Options) -> Result<Self> {
        let wire = Wire::connect(&path, options.timeout)?;
        let mut session = Self {
            wire,
            path,
            options: options.clone(),
            features: 0,
            protocol: 0,
            max_queues: 1,
            config: Config::default(),
            device: None,
            channel: None,
            inflight: None,
        };
        session
            .negotiate()
            .map_err(|e| if e.kind() == Kind::Lost { e.into_kind(Kind::Connect) } else { e })?;
        Ok(session)
    }

    fn negotiate(&mut self) -> Result<()> {
        let offered = self.wire.ask_u64(Code::GetFeatures)?;
        self.wire.tell(Code::SetOwner, &[], &[])?;
        check_class(self.options.class, offered)?;
        let wanted =
            self.options.wanted_features() | feature::PROTOCOL_FEATURES & !self.options.refuse_features;
        self.features = offered & wanted;
        if self.features & feature::VERSION_1 == 0 {
            return Err(fail!(
                Connect,
                "the server does not offer VIRTIO_F_VERSION_1: not a modern virtio device"
            ));
        }
        if self.options.packed && self.features & feature::RING_PACKED == 0 {
            return Err(fail!(Usage, "the server does not offer packed rings: leave --packed out"));
        }
        if self.features & feature::PROTOCOL_FEATURES != 0 {
            let offered = self.wire.ask_u64(Code::GetProtocolFeatures)?;
            let ours = match self.options.class {
                Class::Disk => protocol::SUPPORTED,
                // Messages from a network device do not matter here.
                Class::Net { .. } => protocol::SUPPORTED & !protocol::BACKEND_REQ,
            };
            self.protocol = offered & ours & !self.options.refuse_protocol;
            self.wire.tell(Code::SetProtocolFeatures, &Payload::new().u64(self.protocol), &[])?;
            self.wire.reply_ack = self.has(protocol::REPLY_ACK);
        }
        if self.has(protocol::MQ) {
            self.max_queues = self.wire.ask_u64(Code::GetQueueNum)?.min(u64::from(u16::MAX)) as u16;
        }
        if self.has(protocol::BACKEND_REQ) {
            let (channel, theirs) = BackendChannel::pair()?;
            self.wire.tell(Code::SetBackendReqFd, &[], &[theirs.as_fd()])?;
            self.channel = Some(channel);
        }
        match self.options.class {
            Class::Disk => self.config = self.read_config()?,
            // Many servers leave the configuration space of a network device to the front end.
            Class::Net { .. } if self.has(protocol::CONFIG) => {
                self.device = NetConfig::parse(&self.read_config_bytes(0, NET_CONFIG_LEN as u32)?);
            }
            Class::Net { .. } => {}
        }
        Ok(())
    }

    /// Connects again until `deadline`, negotiates the same features, and passes everything to the
    /// new server. Rings continue from the bases in `rings`. The in-flight region stays the same.
    pub fn reopen(&mut self, memory: &Memory, rings: &[RingSetup<'_>], deadline: Instant) -> Result<()> {
        loop {
            match self.reopen_once(memory, rings) {
                Err(e) if matches!(e.kind(), Kind::Connect | Kind::Lost) && Instant::now() < deadline => {
                    std::thread::sleep(RETRY);
                }
                result => return result,
            }
        }
    }

    fn reopen_once(&mut self, memory: &Memory, rings: &[RingSetup<'_>]) -> Result<()> {
        let mut next = Self::open(self.path.clone(), &self.options)?;
        let missing = (self.features & !next.features, self.protocol & !next.protocol);
        if missing != (0, 0) {
            return Err(fail!(
                Io,
                "the server that came back lacks features {:#x} and protocol features {:#x} that the guest uses: \
                 start it as it was before",
                missing.0,
                missing.1
            ));
        }
        next.features = self.features;
        next.inflight = self.inflight.take();
        let result = next.start(memory, rings);
        if result.is_ok() {
            *self = next;
        } else {
            self.inflight = next.inflight.take();
        }
        result
    }

    /// Passes memory and rings to the server, and starts them.
    pub fn start(&mut self, memory: &Memory, rings: &[RingSetup<'_>]) -> Result<()> {
        self.set_status(ACKNOWLEDGE | DRIVER)?;
        self.set_features(self.features)?;
        if self.has(protocol::STATUS) {
            self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK)?;
            if self.wire.ask_u64(Code::GetStatus)? & FEATURES_OK == 0 {
                return Err(fail!(
                    Lost,
                    "the server did not keep FEATURES_OK: it refuses features that it offered"
                ));
            }
        }
        self.share_inflight(rings)?;
        self.share_memory(memory)?;
        for ring in rings {
            self.set_ring(ring, false)?;
        }
        for ring in rings {
            self.enable(ring.index, true)?;
        }
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK)?;
        // Without acknowledgements, the answer to any message shows that the previous messages were
        // processed.
        if !self.wire.reply_ack {
            self.wire.ask_u64(Code::GetFeatures)?;
        }
        Ok(())
    }

    fn share_inflight(&mut self, rings: &[RingSetup<'_>]) -> Result<()> {
        if !self.has(protocol::INFLIGHT_SHMFD) || rings.is_empty() {
            return Ok(());
        }
        let count = rings.iter().map(|r| r.index).max().unwrap_or(0) + 1;
        let queue_size = rings[0].size;
        if self.inflight.is_none() {
            let ask = Payload::new().u64(0).u64(0).u16(count).u16(queue_size).u32(0);
            let mut reply = self.wire.ask(Code::GetInflightFd, &ask, &[])?;
            let (size, offset) = (read_u64(&reply.payload, 0), read_u64(&reply.payload, 8));
            self.inflight = match (size, offset, reply.fds.pop()) {
                (Some(size), Some(offset), Some(fd)) if size > 0 => Some(InflightRegion { size, offset, fd }),
                (Some(0), _, _) => None, // the specification lets a server say that it needs none
                _ => return Err(fail!(Lost, "GET_INFLIGHT_FD was answered without a file")),
            };
        }
        if let Some(region) = &self.inflight {
            let tell = Payload::new().u64(region.size).u64(region.offset).u16(count).u16(queue_size).u32(0);
            self.wire.tell(Code::SetInflightFd, &tell, &[region.fd.as_fd()])?;
        }
        Ok(())
    }

    fn share_memory(&mut self, memory: &Memory) -> Result<()> {
        let regions = memory.regions();
        let describe = |payload: Payload, r: &super::memory::Region| {
            payload.u64(r.guest_addr).u64(r.size).u64(r.user_addr()).u64(0)
        };
        if self.has(protocol::CONFIGURE_MEM_SLOTS) {
            let slots = self.wire.ask_u64(Code::GetMaxMemSlots)?;
            if (regions.len() as u64) > slots {
                return Err(fail!(
                    Usage,
                    "{} memory regions, but the server takes {slots}: ask for fewer",
                    regions.len()
                ));
            }
            for r in regions {
                self.wire.tell(Code::AddMemReg, &describe(Payload::new().u64(0), r), &[r.fd()])?;
            }
            return Ok(());
        }
        if regions.len() > 8 {
            return Err(fail!(
                Usage,
                "{} memory regions, but SET_MEM_TABLE carries 8: ask for fewer",
                regions.len()
            ));
        }
        let table = regions.iter().fold(Payload::new().u32(regions.len() as u32).u32(0), describe);
        let fds: Vec<BorrowedFd<'_>> = regions.iter().map(|r| r.fd()).collect();
        self.wire.tell(Code::SetMemTable, &table, &fds)
    }

    /// Configures one ring, but does not enable it. `log`: the server logs its writes to the used
    /// ring.
    pub fn set_ring(&mut self, ring: &RingSetup<'_>, log: bool) -> Result<()> {
        let index = u32::from(ring.index);
        let pair = |v: u32| Payload::new().u32(index).u32(v);
        self.wire.tell(Code::SetVringNum, &pair(u32::from(ring.size)), &[])?;
        self.set_ring_addr(ring, log)?;
        self.wire.tell(Code::SetVringBase, &pair(ring.base), &[])?;
        let which = Payload::new().u64(u64::from(ring.index));
        self.wire.tell(Code::SetVringCall, &which, &[ring.call.as_fd()])?;
        self.wire.tell(Code::SetVringKick, &which, &[ring.kick.as_fd()])
    }

    /// Sends only SET_VRING_ADDR, which switches logging for a ring that runs.
    pub fn set_ring_addr(&mut self, ring: &RingSetup<'_>, log: bool) -> Result<()> {
        let user = |area: &super::memory::Area| area.host() as u64;
        let addr = Payload::new()
            .u32(u32::from(ring.index))
            .u32(u32::from(log))
            .u64(user(&ring.desc))
            .u64(user(&ring.device))
            .u64(user(&ring.driver))
            .u64(ring.device.guest());
        self.wire.tell(Code::SetVringAddr, &addr, &[])
    }

    /// Enables or disables a ring. Without protocol features, rings are always enabled.
    pub fn enable(&mut self, ring: u16, on: bool) -> Result<()> {
        if self.features & feature::PROTOCOL_FEATURES == 0 {
            return Ok(());
        }
        self.wire.tell(Code::SetVringEnable, &Payload::new().u32(u32::from(ring)).u32(u32::from(on)), &[])
    }

    /// Sends GET_VRING_BASE, which stops the ring. Returns its base.
    pub fn stop_ring(&mut self, ring: u16) -> Result<u32> {
        let reply = self.wire.ask(Code::GetVringBase, &Payload::new().u32(u32::from(ring)).u32(0), &[])?;
        read_u32(&reply.payload, 4).ok_or_else(|| fail!(Lost, "GET_VRING_BASE was answered too short"))
    }

    /// Sends SET_FEATURES.
    pub fn set_features(&mut self, features: u64) -> Result<()> {
        self.wire.tell(Code::SetFeatures, &Payload::new().u64(features), &[])
    }

    /// Sends SET_STATUS if it was negotiated.
    pub fn set_status(&mut self, status: u64) -> Result<()> {
        if !self.has(protocol::STATUS) {
            return Ok(());
        }
        self.wire.tell(Code::SetStatus, &Payload::new().u64(status), &[])
    }

    /// Sends RESET_DEVICE. The server then drops rings and features, and [`Session::start`] may
    /// follow.
    pub fn reset_device(&mut self) -> Result<()> {
        if !self.has(protocol::RESET_DEVICE) {
            return Err(fail!(Usage, "the server does not offer RESET_DEVICE"));
        }
        self.wire.tell(Code::ResetDevice, &[], &[])
    }

    /// Gives the dirty log to the server.
    pub fn set_log(&mut self, size: u64, fd: BorrowedFd<'_>) -> Result<()> {
        if !self.has(protocol::LOG_SHMFD) {
            return Err(fail!(Usage, "the server does not offer LOG_SHMFD"));
        }
        // The answer is a message of its own, and no acknowledgement (specification,
        // "SET_LOG_BASE").
        self.wire.ask(Code::SetLogBase, &Payload::new().u64(size).u64(0), &[fd]).map(drop)
    }

    /// Reads the configuration space again.
    pub fn read_config(&mut self) -> Result<Config> {
        if !self.has(protocol::CONFIG) {
            return Err(fail!(
                Connect,
                "the server does not offer VHOST_USER_PROTOCOL_F_CONFIG: no way to learn its size"
            ));
        }
        let bytes = self.read_config_bytes(0, CONFIG_LEN as u32)?;
        self.config = Config::parse(&bytes)
            .ok_or_else(|| fail!(Lost, "GET_CONFIG was answered by {} bytes of {CONFIG_LEN}", bytes.len()))?;
        Ok(self.config)
    }

    /// Sends GET_CONFIG for any part.
    pub fn read_config_bytes(&mut self, offset: u32, len: u32) -> Result<Vec<u8>> {
        let ask = Payload::new().u32(offset).u32(len).u32(0).bytes(&vec![0; len as usize]);
        let reply = self.wire.ask(Code::GetConfig, &ask, &[])?;
        Ok(reply.payload.get(12..).unwrap_or_default().to_vec())
    }

    /// Sends SET_CONFIG for any part (the write cache's switch is at 32).
    pub fn write_config_bytes(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        let tell = Payload::new().u32(offset).u32(bytes.len() as u32).u32(0).bytes(bytes);
        self.wire.tell(Code::SetConfig, &tell, &[])
    }

    /// Waits up to `wait` for a message that the configuration changed, and then reads it again.
    pub fn wait_config_change(&mut self, wait: Duration) -> Result<Option<Config>> {
        let Some(channel) = &self.channel else {
            return Err(fail!(Usage, "the server does not offer BACKEND_REQ: it cannot tell of changes"));
        };
        let changed = channel.take(wait)?;
        if changed { self.read_config().map(Some) } else { Ok(None) }
    }

    /// Returns whether a protocol feature was negotiated.
    pub fn has(&self, protocol_feature: u64) -> bool {
        self.protocol & protocol_feature != 0
    }

    /// Returns the negotiated virtio features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns the negotiated protocol features.
    pub fn protocol(&self) -> u64 {
        self.protocol
    }

    /// Returns the number of queues of the server.
    pub fn max_queues(&self) -> u16 {
        self.max_queues
    }

    /// Returns the configuration as last read.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the configuration of a network device, if the server has it.
    pub fn device(&self) -> Option<&NetConfig> {
        self.device.as_ref()
    }

    /// Returns the in-flight region, if the server gave one. Without it, the driver cannot continue
    /// after the death of the server.
    pub fn inflight(&self) -> Option<&InflightRegion> {
        self.inflight.as_ref()
    }

    /// Returns the wire, for messages that have no method here.
    pub fn wire(&mut self) -> &mut Wire {
        &mut self.wire
    }

    /// Returns the server's process id.
    pub fn peer_pid(&self) -> Option<u32> {
        self.wire.peer_pid()
    }

    /// Returns the backend channel, if it was negotiated.
    pub fn channel(&self) -> Option<&BackendChannel> {
        self.channel.as_ref()
    }

    /// Returns the socket and, if there is one, the backend channel, to wait on.
    pub fn fds(&self) -> (BorrowedFd<'_>, Option<BorrowedFd<'_>>) {
        (self.wire.socket(), self.channel.as_ref().map(BackendChannel::fd))
    }

    /// Closes the connection at once. The server sees that its guest is gone.
    pub fn shutdown(&self) {
        let _ = rustix::net::shutdown(self.wire.socket(), rustix::net::Shutdown::Both);
    }
}

/// Returns the vring base that continues a split ring after the death of its server. The server
/// continues after the last used request (QEMU: `virtio_queue_split_restore_last_avail_idx`), and
/// adds the requests in the in-flight region.
pub fn split_base(used_ring: &super::memory::Area) -> u32 {
    u32::from(used_ring.load_u16(2))
}

/// Returns the vring base of a packed ring: position and wrap counter of the next used descriptor,
/// for both directions.
pub fn packed_base(next_used: u16, wrap: bool) -> u32 {
    let half = u32::from(next_used & 0x7fff) | u32::from(wrap) << 15;
    half | half << 16
}

/// Returns an error if a device with these features is not of the expected kind. The kinds share
/// feature bits. But only a network device merges receive buffers. It has no block size, and it
/// does not have the bit of a disk's flush without checksums.
fn check_class(class: Class, offered: u64) -> Result<()> {
    let device = offered & feature::NET_MRG_RXBUF != 0;
    let flush = offered & feature::BLK_FLUSH != 0 && offered & feature::NET_GUEST_CSUM == 0;
    let disk = !device && (flush || offered & feature::BLK_BLK_SIZE != 0);
    match class {
        Class::Disk if device => Err(fail!(Usage, "the server is a network device: use vshunt-bench net")),
        Class::Net { .. } if disk => Err(fail!(Usage, "the server is a disk: use vshunt-bench blk")),
        _ => Ok(()),
    }
}
