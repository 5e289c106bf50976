//! What a network's export must do, one case after the other on one connection, then on a second
//! one.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use virtio::features::*;
use virtio::net::*;

use crate::guest::{Guest, Kind, WANTED};
use crate::host::{FRAME_MIN, GUEST, HEADERS, HOST, Host, Mark, frame, read_mark};
use crate::{Outcome, text};

/// Flows of a case: so many that each of a few queues gets some.
const FLOWS: u16 = 64;
/// Frames of a flow.
const EACH: u32 = 8;
/// Longest that a frame may take, on a busy machine that emulates another.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest frame with the export's MTU.
const FRAME_MAX: usize = 9000 + 14;

struct Case<'a> {
    guest: Guest,
    host: Host,
    ifname: &'a str,
    pairs: u16,
    kind: Kind,
    seed: u32,
    number: u32,
    failed: u32,
}

/// Returns how many cases failed.
pub(crate) fn run(socket: &Path, ifname: &str, pairs: u16, kind: Kind, seed: u32) -> u32 {
    let opened = Host::open(ifname).and_then(|host| Ok((host, Guest::connect(socket, kind)?)));
    let (host, guest) = match opened {
        Ok(both) => both,
        Err(why) => {
            println!("not ok net: a front end connects: {why}");
            return 1;
        }
    };
    let mut c = Case { guest, host, ifname, pairs, kind, seed, number: 0, failed: 0 };
    c.case("what is offered", Case::offers);
    c.case("the configuration space", Case::config);
    c.case("rings are taken over", Case::starts);
    c.case("frames from the guest, on each pair", Case::transmits);
    c.case("frames to the guest, on the pairs of their flows", Case::receives);
    c.case("long frames fill several buffers", Case::long_frames);
    if pairs > 1 {
        c.case("a pair that is switched off gets nothing", Case::switched_off);
    }
    c.case("a ring that is stopped continues where it stood", Case::stops);
    c.case("what waited meanwhile is there", Case::waits);
    c.case("SEND_RARP announces the guest", Case::announces);
    c.case("NET_SET_MTU", Case::mtu);
    c.case("writes are logged", Case::logged);
    let failed = c.failed;
    drop(c);
    let again =
        report("another front end is served after the first", reconnect(socket, ifname, pairs, kind, seed));
    failed + u32::from(!again)
}

fn reconnect(socket: &Path, ifname: &str, pairs: u16, kind: Kind, seed: u32) -> Outcome {
    let (guest, host) = (Guest::connect(socket, kind)?, Host::open(ifname)?);
    let mut c = Case { guest, host, ifname, pairs, kind, seed, number: 1000, failed: 0 };
    c.starts()?;
    c.transmits()?;
    c.receives()
}

fn report(name: &str, result: Outcome) -> bool {
    match &result {
        Ok(()) => println!("ok net: {name}"),
        Err(why) => println!("not ok net: {name}: {why}"),
    }
    result.is_ok()
}

impl Case<'_> {
    fn case(&mut self, name: &str, body: fn(&mut Self) -> Outcome) {
        self.number += 1;
        let result = body(self);
        self.failed += u32::from(!report(name, result));
    }

    fn id(&self) -> u32 {
        self.seed.wrapping_mul(1000).wrapping_add(self.number)
    }

    fn offers(&mut self) -> Outcome {
        let mq = if self.pairs > 1 { 0 } else { bit(VIRTIO_NET_F_MQ) };
        let must = WANTED & !mq | bit(VHOST_F_LOG_ALL) | bit(VIRTIO_NET_F_GUEST_ANNOUNCE);
        let must = must | (0x7F83 & !bit(VIRTIO_NET_F_MTU)) | bit(VIRTIO_NET_F_HOST_USO);
        // What the kernel has not: packed rings, and a control queue.
        let control = bit(VIRTIO_NET_F_CTRL_VQ) | bit(VIRTIO_NET_F_CTRL_GUEST_OFFLOADS);
        let ours = bit(VIRTIO_F_RING_PACKED) | control;
        let must = if self.kind.user { must | ours } else { must };
        // What nobody serves: an IOMMU, and the bit that would double the headers.
        let never = bit(VIRTIO_F_ACCESS_PLATFORM) | bit(VIRTIO_F_ANY_LAYOUT);
        let never = if self.kind.user { never } else { never | ours };
        let offered = self.guest.offered;
        if offered & must != must || offered & never != 0 || offered & mq != 0 {
            return Err(format!("{offered:#x} are offered, {must:#x} must be, {never:#x} never"));
        }
        match self.guest.rings()? {
            n if n == u64::from(self.pairs) * 2 + u64::from(self.kind.user) => Ok(()),
            n => Err(format!("{n} rings for {} pairs", self.pairs)),
        }
    }

    fn config(&mut self) -> Outcome {
        let config = NetConfig {
            mac: GUEST,
            status: VIRTIO_NET_S_LINK_UP,
            max_virtqueue_pairs: self.pairs,
            mtu: 9000,
        };
        match self.guest.config()? {
            bytes if bytes == config.to_bytes() => Ok(()),
            bytes => Err(format!("{bytes:?}")),
        }
    }

    fn starts(&mut self) -> Outcome {
        self.guest.set_up(self.pairs)?;
        (0..self.pairs).try_for_each(|pair| self.guest.enable(pair, true))
    }

    fn transmits(&mut self) -> Outcome {
        let case = self.id();
        let mut number = 0;
        for pair in 0..self.pairs {
            // All of them fit into the socket's buffer; they are counted on the other side.
            for len in (FRAME_MIN..FRAME_MAX).step_by(97).chain([FRAME_MAX]) {
                let mark = Mark { flow: 1000 + pair, number, case };
                self.guest.send(pair, &frame(GUEST, HOST, mark, len))?;
                self.guest.flush(pair)?;
                let got =
                    self.host.receive(PATIENCE).ok_or(format!("pair {pair}: {len} bytes do not come"))?;
                let got_mark = read_mark(&got).ok_or("a strange frame")??;
                if got.len() != len || got_mark != mark {
                    return Err(format!("{} bytes, {got_mark:?}, for {len}, {mark:?}", got.len()));
                }
                number += 1;
            }
            for _ in 0..500 {
                let mark = Mark { flow: 1000 + pair, number, case };
                self.guest.send(pair, &frame(GUEST, HOST, mark, FRAME_MIN))?;
                number += 1;
            }
            self.guest.flush(pair)?;
            for want in number - 500..number {
                let got =
                    self.host.receive(PATIENCE).ok_or(format!("pair {pair}: frame {want} does not come"))?;
                let mark = read_mark(&got).ok_or("a strange frame")??;
                if mark.number != want {
                    return Err(format!("pair {pair}: {mark:?} for {want}: frames overtake one another"));
                }
            }
        }
        Ok(())
    }

    /// Sends frames of many flows to the guest and collects them: by pair, how many. Every frame
    /// must come once, those of a flow in order and on one pair.
    fn exchange(&mut self, on: &[u16]) -> Outcome<BTreeMap<u16, u32>> {
        let case = self.id();
        let mut flows: BTreeMap<u16, (u16, u32)> = BTreeMap::new();
        let mut by_pair = BTreeMap::new();
        for round in 0..EACH {
            for flow in 0..FLOWS {
                let mark = Mark { flow: 2000 + flow, number: round, case };
                self.host.send(&frame(HOST, GUEST, mark, FRAME_MIN + usize::from(flow) * 13))?;
            }
            // As many at once as a queue surely has room for.
            let mut missing = u32::from(FLOWS);
            let end = Instant::now() + PATIENCE;
            while missing > 0 {
                if Instant::now() > end {
                    return Err(format!("round {round}: {missing} of {FLOWS} frames do not come"));
                }
                for &pair in on {
                    let wait = Duration::from_millis(2);
                    while let Some((got, _)) = self.guest.receive(pair, wait)? {
                        let Some(mark) = read_mark(&got) else { continue };
                        let mark = mark?;
                        if mark.case != case {
                            continue;
                        }
                        let (home, next) = flows.entry(mark.flow).or_insert((pair, 0));
                        if (*home, *next) != (pair, mark.number) {
                            return Err(format!(
                                "{mark:?} on pair {pair}; its flow is on {home} and {next} is next"
                            ));
                        }
                        *next += 1;
                        *by_pair.entry(pair).or_insert(0) += 1;
                        missing -= 1;
                    }
                }
            }
        }
        Ok(by_pair)
    }

    fn all(&self) -> Vec<u16> {
        (0..self.pairs).collect()
    }

    fn receives(&mut self) -> Outcome {
        let by_pair = self.exchange(&self.all())?;
        println!("# frames by pair: {by_pair:?}");
        match by_pair.len() == usize::from(self.pairs) {
            true => Ok(()),
            false => Err(format!("{FLOWS} flows came on the pairs {by_pair:?}")),
        }
    }

    fn long_frames(&mut self) -> Outcome {
        let case = self.id();
        for (number, len) in (0u32..).zip([1514, 2036, 2037, 4084, 4085, FRAME_MAX]) {
            let mark = Mark { flow: 77, number, case };
            self.host.send(&frame(HOST, GUEST, mark, len))?;
            let end = Instant::now() + PATIENCE;
            let (got, buffers) = 'found: loop {
                for pair in self.all() {
                    let got = self.guest.receive(pair, Duration::from_millis(2))?;
                    match got.filter(|(got, _)| matches!(read_mark(got), Some(Ok(m)) if m == mark)) {
                        Some(got) => break 'found got,
                        None if Instant::now() > end => return Err(format!("{len} bytes do not come")),
                        None => {}
                    }
                }
            };
            let want = (len + NET_HDR_BYTES).div_ceil(2048);
            if got.len() != len || usize::from(buffers) != want {
                return Err(format!("{} bytes in {buffers} buffers, for {len} in {want}", got.len()));
            }
        }
        Ok(())
    }

    fn switched_off(&mut self) -> Outcome {
        let off = self.pairs - 1;
        self.guest.enable(off, false)?;
        let others: Vec<u16> = (0..off).collect();
        self.exchange(&others)?;
        self.guest.enable(off, true)?;
        self.number += 100;
        let by_pair = self.exchange(&self.all())?;
        match by_pair.contains_key(&off) {
            true => Ok(()),
            false => Err(format!("pair {off} gets nothing after it was switched on again: {by_pair:?}")),
        }
    }

    fn stops(&mut self) -> Outcome {
        for pair in self.all() {
            for ring in [2 * pair, 2 * pair + 1] {
                let base = self.guest.stop(ring)?;
                if ring % 2 == 1 && base == 0 {
                    return Err(format!("ring {ring} stands at 0 after all that was sent"));
                }
                self.guest.tell_ring(ring, base)?;
            }
        }
        self.transmits()?;
        self.exchange(&self.all()).map(drop)
    }

    /// A kick that comes while the ring is stopped is seen when it continues.
    fn waits(&mut self) -> Outcome {
        let case = self.id();
        let base = self.guest.stop(1)?;
        let mark = Mark { flow: 78, number: 5, case };
        self.guest.send(0, &frame(GUEST, HOST, mark, FRAME_MIN))?;
        if self.host.receive(Duration::from_millis(200)).is_some() {
            return Err("a frame goes out though the ring is stopped".to_owned());
        }
        self.guest.tell_ring(1, base)?;
        let got = self.host.receive(PATIENCE).ok_or("the frame does not come")?;
        match read_mark(&got) {
            Some(Ok(got)) if got == mark => self.guest.flush(0),
            other => Err(format!("{other:?}")),
        }
    }

    fn announces(&mut self) -> Outcome {
        if !self.guest.announce(GUEST)? {
            return Err("it is refused".to_owned());
        }
        let got = self.host.receive(PATIENCE).ok_or("no announcement comes")?;
        match got.len() == 60 && got[..6] == [0xFF; 6] && got[12..14] == [0x80, 0x35] && got[22..28] == GUEST
        {
            true => Ok(()),
            false => Err(format!("{:02x?}", &got[..HEADERS.min(got.len())])),
        }
    }

    fn mtu(&mut self) -> Outcome {
        let now = |name: &str| std::fs::read_to_string(format!("/sys/class/net/{name}/mtu")).map_err(text);
        for (mtu, taken, then) in
            [(1400, true, "1400"), (40, false, "1400"), (70_000, false, "1400"), (9000, true, "9000")]
        {
            let (got, is) = (self.guest.set_mtu(mtu)?, now(self.ifname)?);
            if got != taken || is.trim() != then {
                return Err(format!("NET_SET_MTU {mtu}: taken {got}, and the interface has {}", is.trim()));
            }
        }
        Ok(())
    }

    fn logged(&mut self) -> Outcome {
        self.guest.log_writes()?;
        self.exchange(&self.all()).map(drop)
    }
}
