//! The probes of docs/guide/tracing.md: the program has those of the table, and the commands work.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use vshunt_engine::{DEFAULT_POLL_US, Queue, QueueSet, Settings, Token, Uring, Workers};

const PAGE: &str = include_str!("../../../docs/guide/tracing.md");
/// How long a bpftrace runs, one try after the other: on a busy machine it takes seconds to attach.
const TRIES_S: [u64; 3] = [4, 8, 20];

/// Says so where `make test` looks for it. libtest captures what `println!` prints.
fn skip(what: &str, why: &str) {
    let _ = writeln!(std::io::stdout(), "\nskip tracing: {what}: {why}");
}

/// What a program prints, or why it does not run.
fn output_of(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|e| format!("{}: {e}", command.get_program().display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(text) } else { Err(said.lines().next().unwrap_or("it failed").into()) }
}

#[test]
fn the_program_has_the_probes_of_the_table() {
    let notes = match output_of(Command::new("readelf").args(["-n", env!("CARGO_BIN_EXE_vshunt")])) {
        Ok(notes) => notes,
        Err(why) => return skip("the notes of the program", &why),
    };
    let mut found = BTreeSet::new();
    let mut lines = notes.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if line == "Provider: vshunt" {
            let name = lines.next().and_then(|l| l.strip_prefix("Name: ")).expect("a name follows");
            let arguments = lines.find_map(|l| l.strip_prefix("Arguments: ")).expect("arguments follow");
            found.insert((name.to_owned(), arguments.split_whitespace().count()));
        }
    }
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `"));
    let table = rows.map(|row| {
        let cells: Vec<_> = row.trim_end_matches('|').split('|').map(str::trim).collect();
        let arguments = cells[2..].iter().filter(|cell| !cell.is_empty()).count();
        (cells[0].trim_end_matches('`').to_owned(), arguments)
    });
    assert_eq!(found, table.collect());
}

/// A queue that has a request at once whenever none is in flight, for a while.
struct Busy {
    /// Readable for good.
    ready: OwnedFd,
    in_flight: bool,
    armed: bool,
}

impl Queue for Busy {
    fn arm(&mut self, _: &mut Uring, _: Token) {
        self.armed = true;
    }

    fn take(&mut self, uring: &mut Uring, place: Token, _: u32) -> u32 {
        uring.poll_once(self.ready.as_raw_fd(), place.with(0, 1));
        self.in_flight = true;
        1
    }

    fn complete(&mut self, _: &mut Uring, _: Token, _: i32, more: bool) -> u32 {
        assert!(!more);
        self.in_flight = false;
        1
    }

    fn publish(&mut self) -> bool {
        false
    }

    fn has_work(&self) -> bool {
        self.armed && !self.in_flight
    }

    fn wake(&mut self) {}

    fn sleep(&mut self, _: &mut Uring, _: Token, _: u32) -> bool {
        self.has_work()
    }

    fn disarm(&mut self, _: &mut Uring, _: Token) {
        self.armed = false;
    }

    fn at_rest(&self) -> bool {
        !self.in_flight
    }

    fn leave(&mut self, _: &mut Uring) {}
}

/// Moves a busy queue between two workers until `over`: the one without the queue sleeps.
fn move_a_queue(over: &AtomicBool) {
    let workers = Workers::new(DEFAULT_POLL_US).unwrap();
    let ids = [(); 2].map(|()| workers.create(None, &Settings::default()).unwrap());
    let queues = QueueSet::new("traced", &workers, &ids[..1]).unwrap();
    let ready = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
    queues.start(0, Box::new(Busy { ready, in_flight: false, armed: false }));
    while !over.load(Relaxed) {
        for id in [ids[1], ids[0]] {
            queues.attach(0, id, Duration::from_secs(10)).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    queues.stop(0);
    drop(queues);
    workers.end_all();
}

/// bpftrace with an end: after `seconds` it is interrupted, as by Ctrl-C, and ten seconds later it
/// is killed, because one that is interrupted while it attaches may never end.
fn bpftrace(program: &str, seconds: u64) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--foreground", "--signal=INT", "--kill-after=10", &seconds.to_string()]);
    command.args(["bpftrace", "-B", "line", "-e", program]);
    command
}

/// What a bpftrace program prints about this process within `seconds`.
fn trace(program: &str, seconds: u64) -> String {
    let output = bpftrace(program, seconds).stdin(Stdio::null()).output().unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// Ends `move_a_queue`, also if the test fails: its scope waits for the thread.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn the_commands_of_the_page_work() {
    if let Err(why) = output_of(&mut bpftrace("BEGIN { exit(); }", 60)) {
        return skip("the commands of docs/guide/tracing.md", &why);
    }
    let own = std::env::current_exe().unwrap();
    let commands = PAGE.lines().filter_map(|l| l.strip_prefix("bpftrace -e '")?.strip_suffix('\''));
    let programs: Vec<_> = commands.map(|p| p.replace("/usr/bin/vshunt", own.to_str().unwrap())).collect();
    let prints: [&[&str]; 3] = [&["@requests["], &["@slept_us["], &["is traced:0\n", "is on worker "]];
    assert_eq!(programs.len(), prints.len());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| move_a_queue(&over));
        let _over = Over(&over);
        for (program, prints) in programs.iter().zip(prints) {
            let mut last = String::new();
            let printed = TRIES_S.iter().any(|&seconds| {
                last = trace(program, seconds);
                prints.iter().all(|words| last.contains(words))
            });
            assert!(printed, "{program}\nprinted without {prints:?}:\n{last}");
        }
    });
}
