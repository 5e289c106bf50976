//! A back end in this process for tests of the driver: a RAM disk or a network device. It uses the
//! device side of the `virtio` crate, and can be told to die, to answer incorrectly, or to be slow.
//! It is no complete server: it has one connection at a time, and one polling thread for each
//! queue.

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

/// Number of queues that the model offers.
pub(crate) const QUEUES: u16 = 4;

/// The behaviour of the model. Tests set the fields while it runs.
#[derive(Default)]
pub(crate) struct Behaviour {
    /// Dies after this number of further requests. 0: does not die.
    pub(crate) die_after: AtomicI64,
    /// Number of deaths, each after a few more requests than the previous one. 0: dies each time
    /// that `die_after` is set.
    pub(crate) deaths_wanted: AtomicU32,
    /// Number of deaths so far.
    pub(crate) deaths: AtomicU32,
    /// Loses this write: completes it without executing it. Counts down; 0: none.
    pub(crate) lose_write_in: AtomicI64,
    /// Completes this request twice. Counts down; 0: none.
    pub(crate) twice_in: AtomicI64,
    /// Neither takes nor completes requests.
    pub(crate) hang: AtomicBool,
    /// Does not mark its writes in the dirty log.
    pub(crate) forget_to_log: AtomicBool,
    /// Neither copies data nor reorders nor sleeps, to measure the driver's own cost.
    pub(crate) null: AtomicBool,
    /// Protocol and virtio features that are not offered.
    pub(crate) refuse_protocol: AtomicU64,
    /// Set when the model has to announce a changed configuration.
    pub(crate) announce: AtomicBool,
}

/// A RAM disk, and the state that both sides of its model share.
pub(crate) struct Shared {
    pub(crate) behaviour: Behaviour,
    pub(crate) sectors: AtomicU64,
    data: Mutex<Vec<u8>>,
    /// The network device, if this is no disk.
    pub(crate) net: Option<net::Net>,
    /// Ends all queue threads of the current connection.
    stop: AtomicBool,
    dying: AtomicBool,
    /// The used log of each queue, with a number that increases at each change.
    used_logs: Mutex<Vec<Option<UsedLog>>>,
    log_epoch: AtomicU32,
    quit: AtomicBool,
}

/// A running model. It ends when it is dropped.
pub(crate) struct Model {
    pub(crate) shared: Arc<Shared>,
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Model {
    /// Serves a disk of `sectors` at its own socket.
    pub(crate) fn start(name: &str, sectors: u64) -> Self {
        Self::serve(name, sectors, None)
    }

    /// Serves a network device.
    pub(crate) fn start_net(name: &str) -> Self {
        Self::serve(name, 0, Some(net::Net::default()))
    }

    /// Returns the network device.
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

/// A mapping of a file that the front end sent.
struct Mapping {
    host: *mut u8,
    len: usize,
}

// SAFETY: a mapping may be used and unmapped on any thread. It is unmapped when its last owner
// drops it, and code that uses the pointer keeps an owner.
unsafe impl Send for Mapping {}
// SAFETY: the pointer never changes, and accesses through it are raw copies and atomics.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: &OwnedFd, offset: u64, len: usize) -> Arc<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so the new mapping replaces nothing.
        let host =
            unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, offset) }.expect("mmap");
        Arc::new(Self { host: host.cast(), len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: address and length are those of the mapping in `new`. A user of a pointer into it
        // keeps an Arc of it.
        let _ = unsafe { rustix::mm::munmap(self.host.cast(), self.len) };
    }
}
