//! A back-end in this process to try the driver on: a RAM disk, or a network device, behind the `virtio` crate's device
//! side, which dies, lies and dawdles on command. It is no server: one connection at a time, a polling thread a queue.

#![allow(dead_code)] // each test program uses a part of it

pub(crate) mod net;
mod serve;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use virtio::ring::UsedLog;

/// Queues that the model offers.
pub(crate) const QUEUES: u16 = 4;

/// How the model behaves; tests set the fields while it runs.
#[derive(Default)]
pub(crate) struct Behaviour {
    /// Dies when so many more requests were taken; 0: does not.
    pub(crate) die_after: AtomicI64,
    /// How often it is to die, each time after some more requests than before; 0: as often as `die_after` is set.
    pub(crate) deaths_wanted: AtomicU32,
    /// How often it has died.
    pub(crate) deaths: AtomicU32,
    /// Loses this write: says that it was done and does not do it. Counts down; 0: none.
    pub(crate) lose_write_in: AtomicI64,
    /// Completes this request twice. Counts down; 0: none.
    pub(crate) twice_in: AtomicI64,
    /// Neither takes nor completes anything.
    pub(crate) hang: AtomicBool,
    /// Forgets to mark what it writes in the dirty log.
    pub(crate) forget_to_log: AtomicBool,
    /// Neither copies data nor shuffles nor sleeps: for the driver's own cost.
    pub(crate) null: AtomicBool,
    /// Protocol and virtio features not to offer.
    pub(crate) refuse_protocol: AtomicU64,
    /// Set when the model is to say that the configuration changed.
    pub(crate) announce: AtomicBool,
}

/// A RAM disk and what both sides of its model share.
pub(crate) struct Shared {
    pub(crate) behaviour: Behaviour,
    pub(crate) sectors: AtomicU64,
    data: Mutex<Vec<u8>>,
    /// It is a network device, not a disk.
    pub(crate) net: Option<net::Net>,
    /// All queue threads of the present life end when it is set.
    stop: AtomicBool,
    dying: AtomicBool,
    /// The used log of each queue, with a number that grows when it changes.
    used_logs: Mutex<Vec<Option<UsedLog>>>,
    log_epoch: AtomicU32,
    quit: AtomicBool,
}

/// A running model; gone when dropped.
pub(crate) struct Model {
    pub(crate) shared: Arc<Shared>,
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Model {
    /// Serves a disk of `sectors` at a socket of its own.
    pub(crate) fn start(name: &str, sectors: u64) -> Self {
        Self::serve(name, sectors, None)
    }

    /// Serves a network device.
    pub(crate) fn start_net(name: &str) -> Self {
        Self::serve(name, 0, Some(net::Net::default()))
    }

    /// The device.
    pub(crate) fn net(&self) -> &net::Net {
        self.shared.net.as_ref().expect("a model of a device")
    }

    fn serve(name: &str, sectors: u64, net: Option<net::Net>) -> Self {
        let path = std::env::temp_dir().join(format!("vshunt-bench-{}-{name}.sock", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("bind");
        let shared = Arc::new(Shared {
            behaviour: Behaviour::default(),
            sectors: AtomicU64::new(sectors),
            data: Mutex::new(vec![0; sectors as usize * 512]),
            net,
            stop: AtomicBool::new(false),
            dying: AtomicBool::new(false),
            used_logs: Mutex::new(vec![None; usize::from(QUEUES)]),
            log_epoch: AtomicU32::new(0),
            quit: AtomicBool::new(false),
        });
        let ours = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ours.quit.load(Ordering::Acquire) {
                    return;
                }
                serve::connection(stream.expect("accept"), &ours);
            }
        });
        Self { shared, path, thread: Some(thread) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn behaviour(&self) -> &Behaviour {
        &self.shared.behaviour
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::Release);
        self.shared.stop.store(true, Ordering::Release);
        let _ = std::os::unix::net::UnixStream::connect(&self.path);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A mapping of a file that the front-end sent.
struct Mapping {
    host: *mut u8,
    len: usize,
}

// SAFETY: a plain mapping, unmapped when its last owner goes; users answer for what they do there.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: &OwnedFd, offset: u64, len: usize) -> Arc<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let host =
            unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, offset) }.expect("mmap");
        Arc::new(Self { host: host.cast(), len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: as mapped in `new`; the owner of a pointer into it keeps an Arc.
        let _ = unsafe { rustix::mm::munmap(self.host.cast(), self.len) };
    }
}
