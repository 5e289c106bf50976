//! A tap with several queues, one thread for each, which counts the frames of each queue.
//!
//! ```text
//! cargo run --example tap_queues -- vs0 4 --steering rss --netns red
//! ```
//!
//! This makes or adopts the tap `vs0` (as root), attaches its queues, and prints once a second how
//! many frames each queue got since the last line. Lines on standard input change the tap: `-2`
//! detaches queue 2, `+2` attaches it, `steering cpu` lets the sending CPU choose the queue, and
//! `quit` or the end of the input ends the program. The frames are read and dropped.

use std::io::{BufRead, ErrorKind, Read};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vshunt_tap::{Options, Tap, TapQueue};

const USAGE: &str = "tap_queues NAME QUEUES [--steering auto|hash|rss|cpu] [--netns NAME|PATH]";
/// Interval in seconds at which counts are printed, and readers check for the end.
const TICK_S: u64 = 1;
/// The longest frame: 64 KiB of segments, behind its headers.
const FRAME_MAX: usize = (64 << 10) + 64;

type Failure = Box<dyn std::error::Error>;

fn arguments() -> Result<(String, u16, Options), Failure> {
    let mut arguments = std::env::args().skip(1);
    let (Some(name), Some(queues)) = (arguments.next(), arguments.next()) else { return Err(USAGE.into()) };
    let mut options = Options::default();
    while let Some(flag) = arguments.next() {
        match (flag.as_str(), arguments.next()) {
            ("--steering", Some(word)) => options.steering = word.parse()?,
            ("--netns", Some(netns)) => options.netns = Some(netns),
            _ => return Err(USAGE.into()),
        }
    }
    Ok((name, queues.parse().map_err(|_| USAGE)?, options))
}

/// Counts the frames of a queue until `over`.
fn reader(mut queue: &TapQueue, count: &AtomicU64, over: &AtomicBool) -> std::io::Result<()> {
    let mut frame = vec![0; FRAME_MAX];
    let tick = Timespec { tv_sec: TICK_S as i64, tv_nsec: 0 };
    while !over.load(Relaxed) {
        match queue.read(&mut frame) {
            Ok(_) => _ = count.fetch_add(1, Relaxed),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(&queue, PollFlags::IN)], Some(&tick))?;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Executes a line of the input.
fn execute(line: &str, tap: &Tap, queues: &[Arc<TapQueue>]) -> Result<(), Failure> {
    if let Some(word) = line.strip_prefix("steering ") {
        return Ok(tap.set_steering(word.parse()?)?);
    }
    let (on, number) = match (line.strip_prefix('+'), line.strip_prefix('-')) {
        (Some(number), _) => (true, number),
        (_, Some(number)) => (false, number),
        _ => return Err(format!("{line}: say +N, -N, steering WAY or quit").into()),
    };
    let queue = number.parse().ok().and_then(|number: usize| queues.get(number));
    let queue = queue.ok_or_else(|| format!("there is no queue {number}"))?;
    if on {
        queue.attach()?
    } else {
        queue.detach()?
    }
    println!("by the kernel's index: {:?}", tap.order());
    Ok(())
}

fn run() -> Result<(), Failure> {
    let (name, count, options) = arguments()?;
    let tap = Tap::open_with(&name, count, &options)?;
    let queues = tap.queues(count)?;
    let (counts, over): (Vec<AtomicU64>, _) =
        (queues.iter().map(|_| AtomicU64::new(0)).collect(), AtomicBool::new(false));
    println!("{name}: {} queues, steering {}", queues.len(), tap.steering());
    std::thread::scope(|scope| {
        for (queue, count) in queues.iter().zip(&counts) {
            scope.spawn(|| {
                if let Err(e) = reader(queue, count, &over) {
                    eprintln!("a queue is read no more: {e}");
                }
            });
        }
        scope.spawn(|| {
            while !over.load(Relaxed) {
                std::thread::sleep(Duration::from_secs(TICK_S));
                let frames: Vec<u64> = counts.iter().map(|count| count.swap(0, Relaxed)).collect();
                println!("{frames:?}");
            }
        });
        let attached = queues.iter().try_for_each(|queue| queue.attach());
        if attached.is_ok() {
            for line in
                std::io::stdin().lock().lines().map_while(Result::ok).take_while(|line| line != "quit")
            {
                execute(line.trim(), &tap, &queues).unwrap_or_else(|e| eprintln!("{e}"));
            }
        }
        over.store(true, Relaxed);
        attached
    })?;
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("tap_queues: {e}");
            ExitCode::FAILURE
        }
    }
}
