//! A tap interface and its queues.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use vshunt_types::error::{Error, Result};
use vshunt_types::sync::Locked;

use crate::given::Given;
use crate::links::{LinkKind, Links};
use crate::netns::Netns;
use crate::open::{self, Options, Source, check_name};
use crate::queue::{AttachOrder, FileOrigin, TapQueue};
use crate::steering::{self, Steering};
use crate::{Counters, HEADER_LONG, HEADER_SHORT, Offloads, QUEUES_MAX, check_mtu, ifreq};
use vshunt_types::convert::len_u16;

/// A tap interface, as long as this value exists. An interface that was made is removed with its
/// last open file, unless it is persistent.
#[derive(Debug)]
pub struct Tap {
    name: String,
    made: bool,
    macvtap: bool,
    multi_queue: bool,
    uso: bool,
    source: Source,
    links: Option<Links>,
    order: Arc<AttachOrder>,
    /// Locked before the order. Held during the calls that change it.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    queues: Vec<Arc<TapQueue>>,
    header: u32,
    offloads: Offloads,
    steering: Steering,
}

impl Tap {
    /// Calls [`Tap::open_with`] with the default options.
    ///
    /// # Errors
    /// Those of [`Tap::open_with`].
    pub fn open(name: &str, queues: u16) -> Result<Self> {
        Self::open_with(name, queues, &Options::default())
    }

    /// Opens `queues` queues (at least one) of the tap called `name`, all detached. An existing
    /// interface of that name is adopted, and stays when this value is dropped. Otherwise an
    /// interface is made, set up, and removed with this value, unless it is persistent.
    ///
    /// The kernel shows whether other programs have queues of a multi-queue tap, and lets only one
    /// program have a tap with one queue. For a macvtap it shows nothing, and distributes frames to
    /// all its files.
    ///
    /// # Errors
    /// The message has the remedy. There is no /dev/net/tun, or no permission. The name is invalid.
    /// The interface is no tap, is in use, or has one queue although more were requested. There are
    /// more queues than a tap can have. The namespace does not exist. The interface does not
    /// support an option.
    pub fn open_with(name: &str, queues: u16, options: &Options) -> Result<Self> {
        check_name(name)?;
        let netns = Netns::open(options.netns.as_deref())?;
        let cannot = |e| Error::io(format!("cannot look for interface {name}"), e);
        let links = netns.run(Links::new).and_then(|made| made).map_err(cannot)?;
        let link = open::find_unused(&links, name).map_err(cannot)?;
        let exists = link.is_some();
        let source = match link {
            Some(link) if link.kind == LinkKind::Macvtap => {
                Source::Macvtap(open::macvtap_device(name, &link, &netns)?)
            }
            Some(link) if link.queues > 0 => return Err(open::busy(name)),
            Some(link) if matches!(link.kind, LinkKind::Bridge | LinkKind::Other) => {
                return Err(open::no_tap(name));
            }
            _ => Source::Clone(netns),
        };
        let order = Arc::new(AttachOrder::default());
        let (file, multi_queue) = source.first(name, exists)?;
        let first = TapQueue::new(name, 0, multi_queue, &order, FileOrigin::Joined, || Ok(file))?;
        let macvtap = matches!(source, Source::Macvtap(_));
        let tap = Self {
            name: name.to_owned(),
            made: !exists && !options.persist,
            macvtap,
            multi_queue,
            uso: false,
            source,
            links: Some(links),
            order,
            state: State::new(vec![first]),
        };
        let tap = tap.with_options(options)?;
        tap.queues(queues)?;
        if let (false, Some(links)) = (exists, &tap.links) {
            let cannot = |e| Error::io(format!("tap {name} was made and cannot be set up"), e);
            links.set_up(name).map_err(cannot)?;
        }
        open::set_rights(name, macvtap, tap.state().first().as_fd(), options)?;
        Ok(tap)
    }

    /// Adopts open files of a tap (attached by TUNSETIFF, with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR)
    /// or of a macvtap, one for each queue. No more can be opened later. They become non-blocking,
    /// close-on-exec and, if possible, detached.
    ///
    /// The interface may be in any network namespace, and `options` name none. If this process may
    /// not enter that namespace, MTU and counters are unknown. No other program should have queues
    /// of it, or [`Tap::order`] is wrong.
    ///
    /// # Errors
    /// The message has the remedy. A descriptor is no tap's, was opened with other flags, or is not
    /// of the same tap as the others.
    pub fn from_fds(fds: Vec<OwnedFd>, options: &Options) -> Result<Self> {
        let Given { name, macvtap, multi_queue, files, links } = Given::new(fds)?;
        let order = Arc::new(AttachOrder::default());
        let mut queues = Vec::with_capacity(files.len());
        for (number, file) in files.into_iter().enumerate() {
            queues.push(TapQueue::new(&name, number, multi_queue, &order, FileOrigin::Given, || Ok(file))?);
        }
        let (source, state) = (Source::Given, State::new(queues));
        let tap = Self { name, made: false, macvtap, multi_queue, uso: false, source, links, order, state };
        let tap = tap.with_options(options)?;
        open::set_rights(&tap.name, macvtap, tap.state().first().as_fd(), options)?;
        Ok(tap)
    }

    /// Applies the options to a new value.
    fn with_options(mut self, options: &Options) -> Result<Self> {
        let with_uso = Offloads { csum: true, uso: true, ..Offloads::default() };
        let uso = self.apply_offloads(&self.state(), with_uso).is_ok();
        self.uso = uso;
        self.apply_offloads(&self.state(), Offloads::default())?;
        self.set_header(HEADER_SHORT)?;
        self.set_steering(options.steering)?;
        open::set_address(&self.name, self.state().first().as_fd(), options)?;
        Ok(self)
    }

    /// Returns the name of the interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the interface is removed with this value.
    pub fn made(&self) -> bool {
        self.made
    }

    /// Returns whether it can have more than one queue.
    pub fn multi_queue(&self) -> bool {
        self.multi_queue
    }

    /// Returns the most queues that it can have open.
    pub fn queues_max(&self) -> u16 {
        match (&self.source, self.multi_queue) {
            (Source::Given, _) => self.open_queues(),
            (_, true) => QUEUES_MAX,
            (_, false) => 1,
        }
    }

    /// Returns whether it supports UDP segments ([`Offloads::uso`]): Linux 6.2 and later.
    pub fn has_uso(&self) -> bool {
        self.uso
    }

    /// Returns whether its interface still exists. Another program may remove it.
    pub fn is_there(&self) -> bool {
        ifreq::joined(self.state().first()).is_ok()
    }

    /// Returns the number of open queues.
    pub fn open_queues(&self) -> u16 {
        len_u16(self.state().queues.len())
    }

    /// Returns the attached queues, by their numbers in [`Tap::queues`], in the order of the kernel
    /// and its steering programs. When a queue is detached, the last one takes its place. A queue
    /// that is attached becomes the last one.
    pub fn order(&self) -> Vec<usize> {
        self.order.now()
    }

    /// Returns the first `count` queues, and opens those that are not open yet.
    ///
    /// # Errors
    /// It is not multi-queue, or cannot have so many.
    pub fn queues(&self, count: u16) -> Result<Vec<Arc<TapQueue>>> {
        let name = &self.name;
        if count > 1 && !self.multi_queue {
            return Err(Error::unsupported(format!(
                "interface {name} is a tap with one queue, and {count} are asked for; give queues=1, or make it again: \
                 ip tuntap add dev {name} mode tap multi_queue"
            )));
        }
        let mut state = self.state();
        while state.queues.len() < usize::from(count) {
            let (number, join) = (state.queues.len(), || self.source.more(name));
            let queue = TapQueue::new(name, number, true, &self.order, FileOrigin::Joined, join)?;
            if self.macvtap {
                self.apply_header(&queue, state.header)?;
            }
            state.queues.push(Arc::new(queue));
        }
        Ok(state.queues.iter().take(count.into()).cloned().collect())
    }

    /// Sets the length of the header before each frame, for all queues: [`HEADER_SHORT`] or
    /// [`HEADER_LONG`].
    ///
    /// # Errors
    /// Those of the ioctl.
    pub fn set_header(&self, bytes: u32) -> Result<()> {
        let mut state = self.state();
        if state.header == bytes {
            return Ok(());
        }
        // The interface has one value for all files. For a macvtap each file has its own.
        let files = if self.macvtap { state.queues.len() } else { 1 };
        state.queues.iter().take(files).try_for_each(|queue| self.apply_header(queue, bytes))?;
        state.header = bytes;
        Ok(())
    }

    fn apply_header(&self, queue: &TapQueue, bytes: u32) -> Result<()> {
        ifreq::set_int(queue, ifreq::TUNSETVNETHDRSZ, bytes.cast_signed())
            .map_err(|e| Error::io(format!("tap {} cannot have headers of {bytes} bytes", self.name), e))
    }

    /// Sets the offload work that readers do, for all queues.
    ///
    /// # Errors
    /// Those of the ioctl.
    pub fn set_offloads(&self, offloads: Offloads) -> Result<()> {
        let mut state = self.state();
        if state.offloads != offloads {
            self.apply_offloads(&state, offloads)?;
            state.offloads = offloads;
        }
        Ok(())
    }

    fn apply_offloads(&self, state: &State, offloads: Offloads) -> Result<()> {
        ifreq::set_number(state.first(), ifreq::TUNSETOFFLOAD, offloads.bits().into()).map_err(|e| {
            match e.raw_os_error() {
                Some(libc::EBADFD) => Error::io(
                    format!("interface {} is gone; remove the network, and add it again", self.name),
                    e,
                ),
                _ => Error::io(
                    format!("tap {} cannot be told which checksums and segments its guest takes", self.name),
                    e,
                ),
            }
        })
    }

    /// Returns how the queue of a frame is chosen.
    pub fn steering(&self) -> Steering {
        self.state().steering
    }

    /// Sets how the queue of a frame is chosen. This is allowed at any time, and may move flows to
    /// other queues.
    ///
    /// # Errors
    /// This user may load no eBPF program, or the interface takes none. The message has the remedy.
    pub fn set_steering(&self, steering: Steering) -> Result<()> {
        let mut state = self.state();
        if state.steering == steering {
            return Ok(());
        }
        let program = steering::load(steering).map_err(|e| steering::explain(steering, e))?;
        let set =
            ifreq::set_int(state.first(), ifreq::TUNSETSTEERINGEBPF, steering::argument(program.as_ref()));
        set.map_err(|e| match e.raw_os_error() {
            Some(libc::EINVAL | libc::ENOTTY) => Error::unsupported(format!(
                "interface {} takes no program for steering={steering}: a tap does, of Linux 4.16 or later, and no macvtap; \
                 leave steering out",
                self.name
            )),
            _ => Error::io(format!("tap {} cannot have steering={steering}", self.name), e),
        })?;
        state.steering = steering;
        Ok(())
    }

    /// Returns the bytes of the longest IP packet.
    ///
    /// # Errors
    /// The interface is gone, or in a namespace that this process may not enter.
    pub fn mtu(&self) -> Result<u32> {
        let name = &self.name;
        let cannot = |e| Error::io(format!("the MTU of tap {name} cannot be read"), e);
        let link = self.links()?.find(name).map_err(cannot)?;
        link.map(|link| link.mtu).ok_or_else(|| cannot(io::Error::from_raw_os_error(libc::ENODEV)))
    }

    /// Returns the addresses by which the host sends through the interface: its own, and that of
    /// the bridge that it is a port of. Empty for a macvtap, whose address is that of the guest,
    /// and in a network namespace that this process may not enter. `None`: the kernel gave no
    /// answer.
    pub fn host_addresses(&self) -> Option<Vec<[u8; 6]>> {
        let Some(links) = self.links.as_ref().filter(|_| !self.macvtap) else { return Some(Vec::new()) };
        let link = links.find(&self.name).ok()??;
        let master = match link.master {
            Some(index) => links.find_index(index).ok()?,
            None => None,
        };
        let bridge = master.filter(|master| master.kind == LinkKind::Bridge);
        Some(link.address.into_iter().chain(bridge.and_then(|bridge| bridge.address)).collect())
    }

    /// Sets the bytes of the longest IP packet.
    ///
    /// # Errors
    /// The MTU is out of range, or this process may not set it.
    pub fn set_mtu(&self, mtu: u32) -> Result<()> {
        let name = &self.name;
        check_mtu(mtu)?;
        self.links()?.set_mtu(name, mtu).map_err(|e| match e.raw_os_error() {
            Some(libc::EPERM) => Error::io(
                format!(
                    "tap {name} cannot be given an MTU without CAP_NET_ADMIN; run as root, or leave out mtu"
                ),
                e,
            ),
            _ => Error::io(format!("tap {name} cannot be given an MTU of {mtu}"), e),
        })
    }

    fn links(&self) -> Result<&Links> {
        self.links.as_ref().ok_or_else(|| {
            Error::unsupported(format!(
                "tap {} is in a network namespace that this program may not enter; run as root (CAP_SYS_ADMIN)",
                self.name
            ))
        })
    }

    /// Sends a frame to the host as if it came from the guest.
    ///
    /// # Errors
    /// The interface is down.
    pub fn inject(&self, frame: &[u8]) -> Result<()> {
        let state = self.state();
        let header = [0; HEADER_LONG as usize];
        let parts =
            [IoSlice::new(header.get(..state.header as usize).unwrap_or(&header)), IoSlice::new(frame)];
        match rustix::io::writev(state.first(), &parts) {
            Ok(_) => Ok(()),
            Err(e) => {
                Err(Error::io(format!("tap {} does not take a frame (is it up?)", self.name), e.into()))
            }
        }
    }

    /// Returns the traffic of the interface. `None`: it has moved to another network namespace, or
    /// this process may not enter its namespace.
    pub fn counters(&self) -> Option<Counters> {
        Some(self.links.as_ref()?.find(&self.name).ok()??.counters)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }
}

impl State {
    fn new(queues: Vec<TapQueue>) -> Mutex<Self> {
        let queues = queues.into_iter().map(Arc::new).collect();
        // The header of an adopted interface is not known.
        Mutex::new(Self { queues, header: 0, offloads: Offloads::default(), steering: Steering::Auto })
    }

    #[expect(clippy::indexing_slicing, reason = "both constructors of a tap make at least one queue")]
    fn first(&self) -> &TapQueue {
        &self.queues[0]
    }
}

impl Drop for Tap {
    /// An interface that stays uses the kernel's own steering again.
    fn drop(&mut self) {
        if !self.made {
            let _ = self.set_steering(Steering::Auto);
        }
    }
}

#[cfg(test)]
mod tests;
