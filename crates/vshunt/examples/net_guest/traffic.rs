//! Frames both ways for as long as the test wants, while it moves queues, switches pairs, or kills
//! the daemon.
//!
//! Lines on stdin: `off PAIR`, `on PAIR`, and by the control queue `pairs COUNT` and `offloads
//! BITS`, each answered by `done`; `stop` ends it. With a control queue no frame may come on a pair
//! that is not active. A daemon that dies is waited for, and gets the rings as they stand with the
//! in-flight region of before. Each flow's frames must come in order (where pairs are switched, on
//! each pair), none twice, each as it was sent; the last line says how many were lost: `traffic
//! to-guest SENT LOST from-guest SENT LOST`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use virtio::net::{Command, VIRTIO_NET_OK};

use crate::guest::{Guest, Kind};
use crate::host::{FRAME_MIN, GUEST, HOST, Host, Mark, frame, read_mark};
use crate::{Outcome, text};

const FLOWS: u16 = 32;
/// Frames on their way, each direction: no more than a tap's queue and a ring have room for.
const WINDOW: u32 = 150;
/// After so long without any, what is on its way is taken to be lost.
const LOST_AFTER: Duration = Duration::from_millis(300);
/// A daemon is back by then.
const BACK_WITHIN: Duration = Duration::from_secs(60);
const CASE: u32 = 0x7aff;

/// One direction's frames, of all flows.
#[derive(Default)]
struct Count {
    sent: AtomicU32,
    got: AtomicU32,
    /// What was on its way when it was taken to be lost.
    given_up: AtomicU32,
}

impl Count {
    fn open(&self) -> u32 {
        self.sent.load(SeqCst).saturating_sub(self.got.load(SeqCst) + self.given_up.load(SeqCst))
    }

    fn lost(&self) -> u32 {
        self.sent.load(SeqCst).saturating_sub(self.got.load(SeqCst))
    }
}

#[derive(Default)]
struct Shared {
    to_guest: Count,
    from_guest: Count,
    pause: AtomicBool,
    stop: AtomicBool,
}

/// What came: the next number of a flow, and all that came before.
#[derive(Default)]
struct FrameOrder {
    /// By flow and pair. Where pairs were switched a flow goes to another one, and may overtake
    /// itself on the way there.
    next: BTreeMap<(u16, u16), u32>,
    came: BTreeSet<(u16, u32)>,
    switched: bool,
}

impl FrameOrder {
    /// A frame that came on a pair. Whether it is a frame of the test.
    fn next(&mut self, pair: u16, bytes: &[u8]) -> Outcome<bool> {
        let Some(mark) = read_mark(bytes) else { return Ok(false) };
        let mark = mark?;
        let pair = if self.switched { pair } else { 0 };
        let next = self.next.entry((mark.flow, pair)).or_insert(0);
        if mark.number < *next {
            return Err(format!("{mark:?} after {next} of its flow on pair {pair}"));
        }
        *next = mark.number + 1;
        match self.came.insert((mark.flow, mark.number)) {
            true => Ok(true),
            false => Err(format!("{mark:?} comes twice")),
        }
    }
}

/// The next frame of a direction: its flow, and how long it is.
struct Source {
    first: u16,
    next: BTreeMap<u16, u32>,
    position: u32,
}

impl Source {
    fn new(first: u16) -> Self {
        Self { first, next: BTreeMap::new(), position: 0 }
    }

    fn flow(&self) -> u16 {
        self.first + (self.position % u32::from(FLOWS)) as u16
    }

    fn make(&mut self, from: [u8; 6], to: [u8; 6]) -> Vec<u8> {
        let flow = self.flow();
        let number = *self.next.get(&flow).unwrap_or(&0);
        let len = match self.position % 61 {
            0 => 9000,
            7 => 4000,
            n if n % 5 == 0 => 1514,
            n => FRAME_MIN + n as usize,
        };
        frame(from, to, Mark { flow, number, case: CASE }, len)
    }

    /// The frame that was made is on its way.
    fn sent(&mut self) {
        *self.next.entry(self.flow()).or_insert(0) += 1;
        self.position += 1;
    }
}

/// Sends from the host to the guest.
fn host_sends(shared: &Shared, host: &Host) {
    let mut source = Source::new(3000);
    let (mut seen, mut since) = (0, Instant::now());
    let count = &shared.to_guest;
    while !shared.stop.load(SeqCst) {
        let got = count.got.load(SeqCst);
        if got != seen {
            (seen, since) = (got, Instant::now());
        }
        if shared.pause.load(SeqCst) || count.open() >= WINDOW {
            if since.elapsed() > LOST_AFTER {
                count.given_up.fetch_add(count.open(), SeqCst);
                since = Instant::now();
            }
            std::thread::sleep(Duration::from_micros(200));
            continue;
        }
        // Where nobody has the tap, it is not sent.
        match host.send(&source.make(HOST, GUEST)) {
            Ok(()) => {
                count.sent.fetch_add(1, SeqCst);
                source.sent();
            }
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Takes what the guest sends.
fn host_receives(shared: &Shared, host: &Host) -> Outcome {
    let mut order = FrameOrder::default();
    while !shared.stop.load(SeqCst) {
        let Some(bytes) = host.receive(Duration::from_millis(20)) else { continue };
        if order.next(0, &bytes)? {
            shared.from_guest.got.fetch_add(1, SeqCst);
        }
    }
    Ok(())
}

fn commands() -> Receiver<String> {
    let (tell, told) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                return;
            }
        }
    });
    told
}

/// The guest, in the main thread.
struct Driver<'a> {
    guest: Guest,
    socket: &'a Path,
    shared: Arc<Shared>,
    on: Vec<bool>,
    /// No frame may come on pairs that are off.
    strict: bool,
    order: FrameOrder,
    source: Source,
    since: Instant,
    reconnects: u32,
}

impl Driver<'_> {
    /// Takes all that is there on a pair.
    fn receive(&mut self, pair: u16) -> Outcome<bool> {
        let mut any = false;
        while let Some((bytes, _)) = self.guest.receive(pair, Duration::ZERO)? {
            if self.order.next(pair, &bytes)? {
                if self.strict && !self.on[usize::from(pair)] {
                    return Err(format!("a frame comes on pair {pair}, which is not active"));
                }
                self.shared.to_guest.got.fetch_add(1, SeqCst);
                any = true;
            }
        }
        Ok(any)
    }

    fn send(&mut self) -> Outcome<bool> {
        let count = &self.shared.from_guest;
        let pair = self.source.flow() % self.on.len() as u16;
        if !self.on[usize::from(pair)] {
            self.source.position += 1;
            return Ok(true);
        }
        if count.open() >= WINDOW {
            if self.since.elapsed() > LOST_AFTER {
                count.given_up.fetch_add(count.open(), SeqCst);
            }
            return Ok(false);
        }
        self.since = Instant::now();
        let bytes = self.source.make(GUEST, HOST);
        let sent = self.guest.try_send(pair, &bytes)?;
        if sent {
            self.source.sent();
            count.sent.fetch_add(1, SeqCst);
        }
        Ok(sent)
    }

    fn step(&mut self) -> Outcome {
        if self.guest.lost() {
            // Its pairs are switched on one after the other: frames that wait at the first one are
            // overtaken by those that come to the next.
            self.order.switched = true;
            self.guest.reconnect(self.socket, BACK_WITHIN)?;
            self.reconnects += 1;
            self.stop_early()?;
        }
        let mut any = false;
        for pair in 0..self.on.len() as u16 {
            any |= self.receive(pair)?;
        }
        for _ in 0..16 {
            if !self.send()? {
                break;
            }
            any = true;
        }
        if !any {
            std::thread::sleep(Duration::from_micros(300));
        }
        Ok(())
    }

    /// Stops the rings of a pair right after a new daemon has taken over the requests in flight of
    /// the former one, and starts them where they stand. No buffer that it had taken ahead may be
    /// missing.
    ///
    /// The new daemon may be killed here, too. Then the next step connects again.
    fn stop_early(&mut self) -> Outcome {
        let pair = self.reconnects as u16 % self.on.len() as u16;
        for ring in [2 * pair, 2 * pair + 1] {
            let base = match self.guest.stop(ring) {
                Err(_) if self.guest.lost() => return Ok(()),
                stopped => stopped?,
            };
            let want = self.guest.base(ring)?;
            if base != want {
                return Err(format!(
                    "ring {ring} after a kill: the device stands at {base:#x}, not {want:#x}"
                ));
            }
            match self.guest.tell_ring(ring, base) {
                Err(_) if self.guest.lost() => return Ok(()),
                told => told?,
            }
        }
        Ok(())
    }

    /// Nobody sends to the guest meanwhile, and what was on its way came.
    fn quiet(&mut self) -> Outcome {
        self.shared.pause.store(true, SeqCst);
        let mut since = Instant::now();
        while self.shared.to_guest.open() > 0 && since.elapsed() < LOST_AFTER {
            for pair in 0..self.on.len() as u16 {
                if self.receive(pair)? {
                    since = Instant::now();
                }
            }
        }
        Ok(())
    }

    fn command(&mut self, line: &str) -> Outcome {
        let (word, number) = line.split_once(' ').ok_or_else(|| format!("what is {line:?}"))?;
        match word {
            "pairs" => self.use_pairs(number.parse().map_err(text)?)?,
            "offloads" => self.set(Command::Offloads(number.parse().map_err(text)?))?,
            _ => {
                let pair: u16 = number.parse().map_err(text)?;
                self.order.switched = true;
                self.on[usize::from(pair)] = word == "on";
                self.guest.enable(pair, word == "on")?;
            }
        }
        println!("done");
        Ok(())
    }

    /// Has the device use the first `count` pairs.
    fn use_pairs(&mut self, count: u16) -> Outcome {
        self.order.switched = true;
        // More may be used once it is told, fewer once it has answered.
        let pairs = 0..self.on.len() as u16;
        pairs.clone().filter(|pair| *pair < count).for_each(|pair| self.on[usize::from(pair)] = true);
        self.set(Command::Pairs(count))?;
        for pair in pairs.filter(|pair| *pair >= count) {
            self.receive(pair)?;
            self.on[usize::from(pair)] = false;
        }
        Ok(())
    }

    /// Gives the device a command, and continues until it is done; whatever becomes of the daemon
    /// meanwhile.
    fn set(&mut self, command: Command) -> Outcome {
        self.guest.command(command)?;
        let end = Instant::now() + BACK_WITHIN;
        loop {
            match self.guest.answer()? {
                Some(VIRTIO_NET_OK) => return Ok(()),
                Some(answer) => return Err(format!("{command:?} is answered by {answer}")),
                None if Instant::now() > end => return Err(format!("{command:?} is not answered")),
                None => self.step()?,
            }
        }
    }

    /// All that was sent is done, and the device has no receive buffer for itself.
    fn end(&mut self) -> Outcome {
        self.quiet()?;
        let end = Instant::now() + LOST_AFTER;
        while self.shared.from_guest.open() > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        for pair in 0..self.on.len() as u16 {
            self.guest.flush(pair)?;
            self.receive(pair)?;
            let (base, want) = (self.guest.stop(2 * pair)?, self.guest.base(2 * pair)?);
            if base != want {
                return Err(format!(
                    "pair {pair}: the device stands at {base:#x}, all its buffers are used at {want:#x}"
                ));
            }
        }
        Ok(())
    }
}

/// See the module. Returns how many things failed.
pub(crate) fn run(socket: &Path, ifname: &str, pairs: u16, kind: Kind) -> u32 {
    match traffic(socket, ifname, pairs, kind) {
        Ok(()) => 0,
        Err(why) => {
            println!("not ok net: traffic: {why}");
            1
        }
    }
}

fn traffic(socket: &Path, ifname: &str, pairs: u16, kind: Kind) -> Outcome {
    let (sender, receiver) = (Host::open(ifname)?, Host::open(ifname)?);
    let mut guest = Guest::connect(socket, kind)?;
    guest.set_up(pairs)?;
    (0..pairs).try_for_each(|pair| guest.enable(pair, true))?;
    let shared = Arc::new(Shared::default());
    let sending = std::thread::spawn({
        let shared = shared.clone();
        move || host_sends(&shared, &sender)
    });
    let receiving = std::thread::spawn({
        let shared = shared.clone();
        move || host_receives(&shared, &receiver)
    });
    let mut driver = Driver {
        guest,
        socket,
        shared: shared.clone(),
        // A device with a control queue begins with one.
        on: (0..pairs).map(|pair| pair == 0 || !kind.control).collect(),
        strict: kind.control,
        order: FrameOrder::default(),
        source: Source::new(4000),
        since: Instant::now(),
        reconnects: 0,
    };
    let commands = commands();
    println!("begins");
    let mut result = Ok(());
    while result.is_ok() && !receiving.is_finished() {
        result = match commands.try_recv().ok().as_deref() {
            Some("stop") => break,
            Some(line) => driver.command(line),
            None => driver.step(),
        };
    }
    let result = result.and_then(|()| driver.end());
    shared.stop.store(true, SeqCst);
    sending.join().map_err(|_| "the sender panicked")?;
    receiving.join().map_err(|_| "the receiver panicked")??;
    result?;
    let (to, from) = (&shared.to_guest, &shared.from_guest);
    println!("# {} reconnects", driver.reconnects);
    println!(
        "traffic to-guest {} {} from-guest {} {}",
        to.sent.load(SeqCst),
        to.lost(),
        from.sent.load(SeqCst),
        from.lost()
    );
    Ok(())
}
