//! Descriptors that clients pass correctly or incorrectly.

use std::fs::{self, File};
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::pipe::pipe;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;
use crate::qmp::fdset::{SET_FDS_MAX, SETS_MAX};

impl Raw {
    fn ready(rig: &Rig) -> Self {
        let mut raw = Self::connect(rig);
        raw.ask("{'execute': 'qmp_capabilities'}");
        raw
    }

    /// Sends `text` with these descriptors.
    fn pass(&self, text: &str, fds: &[OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [IoSlice::new(text.as_bytes())];
        assert_eq!(sendmsg(self.0.get_ref(), &bytes, &mut control, SendFlags::empty()), Ok(text.len()));
    }

    fn add(&mut self, fd: OwnedFd) -> Value {
        self.pass("{'execute': 'add-fd'}", &[fd]);
        self.read()
    }

    fn sets(&mut self) -> Value {
        self.ask("{'execute': 'query-fdsets'}")["return"].take()
    }
}

/// The read end of a pipe. It shows whether any process has the write end open.
struct PipeWatch(OwnedFd);

fn watched() -> (PipeWatch, OwnedFd) {
    let (read, write) = pipe().unwrap();
    (PipeWatch(read), write)
}

impl PipeWatch {
    /// Waits until no process has the other end open.
    fn closed(&self) {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let time = rustix::time::Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&time)), Ok(1), "the descriptor is not closed");
        assert!(fds[0].revents().contains(PollFlags::HUP));
    }

    fn is_open(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut fds, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0)
    }
}

fn desc(answer: &Value) -> &str {
    answer["error"]["desc"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

#[test]
fn sets_are_made_listed_and_removed_as_qemu_has_it() {
    let rig = rig();
    let mut raw = Raw::ready(&rig);
    assert_eq!(raw.sets(), json!([]));
    assert_eq!(desc(&raw.ask("{'execute': 'add-fd'}")), "No file descriptor supplied via SCM_RIGHTS");
    let (first, fd) = watched();
    let made = raw.add(fd)["return"].take();
    assert_eq!(made["fdset-id"], 0);
    let (second, fd) = watched();
    raw.pass("{'execute': 'add-fd', 'arguments': {'fdset-id': 0, 'opaque': 'x'}}", &[fd]);
    let more = raw.read()["return"].take();
    let (third, fd) = watched();
    raw.pass("{'execute': 'add-fd', 'arguments': {'fdset-id': 7}}", &[fd]);
    assert_eq!(raw.read()["return"]["fdset-id"], 7);
    let list = raw.sets();
    assert_eq!(list[0]["fds"], json!([{ "fd": made["fd"] }, { "fd": more["fd"], "opaque": "x" }]));
    assert_eq!((&list[1]["fdset-id"], list.as_array().map(Vec::len)), (&json!(7), Some(2)));
    let one = json!({ "execute": "remove-fd", "arguments": { "fdset-id": 0, "fd": made["fd"] } });
    assert_eq!(raw.ask(&one.to_string())["return"], json!({}));
    first.closed();
    assert!(second.is_open());
    assert!(desc(&raw.ask(&one.to_string())).ends_with("not found"));
    raw.ask("{'execute': 'remove-fd', 'arguments': {'fdset-id': 0}}");
    second.closed();
    for id in ["0", "-1", "4294967296"] {
        let answer = raw.ask(&format!("{{'execute': 'remove-fd', 'arguments': {{'fdset-id': {id}}}}}"));
        assert!(answer.get("error").is_some(), "{id}: {answer}");
    }
    assert_eq!(raw.sets().as_array().map(Vec::len), Some(1));
    // The descriptors are kept as long as one client is connected.
    let mut other = Raw::ready(&rig);
    drop(raw);
    assert_eq!(other.sets()[0]["fdset-id"], 7);
    assert!(third.is_open());
    drop(other);
    third.closed();
    rig.server.stop();
}

#[test]
fn a_descriptor_that_no_add_fd_takes_is_closed() {
    let rig = rig();
    let mut raw = Raw::ready(&rig);
    let one = |raw: &mut Raw, text: &str| {
        let (watch, fd) = watched();
        raw.pass(text, &[fd]);
        let answer = raw.read();
        watch.closed();
        answer
    };
    one(&mut raw, "{'execute': 'query-version'}");
    for bad in [
        "{'execute': 'add-fd', 'arguments': {'x': 1}}",
        "{'execute': 'add-fd', 'arguments': {'fdset-id': -1}}",
    ] {
        assert!(one(&mut raw, bad).get("error").is_some());
    }
    for bad in ["junk\n", "{'execute': 7}", "[1]", "{'a': \u{1}\n"] {
        assert!(one(&mut raw, bad).get("error").is_some(), "{bad}");
        raw.send("\n");
    }
    let (watch, fd) = watched();
    raw.pass("\n", &[fd]);
    watch.closed();
    // A descriptor before the negotiation, and one with the end of the stream.
    let mut early = Raw::connect(&rig);
    assert_eq!(class(&one(&mut early, "{'execute': 'add-fd'}")), "CommandNotFound");
    let (watch, fd) = watched();
    early.pass("{'execute': 'add", &[fd]);
    drop(early);
    watch.closed();
    assert_eq!(raw.sets(), json!([]));
    rig.server.stop();
}

#[test]
fn of_many_descriptors_one_is_kept() {
    let rig = rig();
    let mut raw = Raw::ready(&rig);
    let (watches, fds): (Vec<_>, Vec<_>) = (0..8).map(|_| watched()).unzip();
    raw.pass("{'execute': 'add-fd'}", &fds);
    drop(fds);
    assert_eq!(raw.read()["return"]["fdset-id"], 0);
    watches[1..].iter().for_each(PipeWatch::closed);
    assert!(watches[0].is_open());
    assert_eq!(raw.sets()[0]["fds"].as_array().map(Vec::len), Some(1));
    // One descriptor with each piece of an incomplete message: the last one counts.
    let mut last = None;
    raw.pass("{'execute': 'add-fd', 'arguments': {'opaque': '", &[watched().1]);
    for _ in 0..200 {
        let (watch, fd) = watched();
        raw.pass("x", &[fd]);
        last.replace(watch).iter().for_each(PipeWatch::closed);
    }
    assert!(last.as_ref().is_some_and(PipeWatch::is_open));
    raw.send("'}}");
    assert_eq!(raw.read()["return"]["fdset-id"], 1);
    assert!(last.as_ref().is_some_and(PipeWatch::is_open));
    // Earlier messages in the same read do not take it.
    let (watch, fd) = watched();
    raw.send("{'execute': 'query-version'}");
    raw.pass("{'execute': 'query-version'} {'execute': 'add-fd'} {'execute': 'add-fd'}", &[fd]);
    assert!(raw.read().get("return").is_some() && raw.read().get("return").is_some());
    assert_eq!(raw.read()["return"]["fdset-id"], 2);
    assert_eq!(desc(&raw.read()), "No file descriptor supplied via SCM_RIGHTS");
    assert!(watch.is_open());
    rig.server.stop();
}

#[test]
fn sets_and_their_descriptors_are_limited() {
    let rig = rig();
    let mut raw = Raw::ready(&rig);
    let null = || OwnedFd::from(File::open("/dev/null").unwrap());
    for _ in 0..SET_FDS_MAX {
        raw.pass("{'execute': 'add-fd', 'arguments': {'fdset-id': 5}}", &[null()]);
        assert!(raw.read().get("return").is_some());
    }
    let (watch, fd) = watched();
    raw.pass("{'execute': 'add-fd', 'arguments': {'fdset-id': 5}}", &[fd]);
    assert!(desc(&raw.read()).contains("16 descriptors"));
    watch.closed();
    // The soft limit of open files may be as low as the limit of sets.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    for _ in 1..SETS_MAX {
        assert!(raw.add(null()).get("return").is_some());
    }
    let (watch, fd) = watched();
    assert!(desc(&raw.add(fd)).contains("1024 fd sets"));
    watch.closed();
    rig.server.stop();
}

/// Returns the number of descriptors of this process that refer to that file.
fn open_of(path: &Path) -> usize {
    let fds = fs::read_dir("/proc/self/fd").unwrap().flatten();
    fds.filter(|fd| fs::read_link(fd.path()).is_ok_and(|target| target == path)).count()
}

#[test]
fn a_set_is_a_disks_file_and_stays_open_as_long_as_the_disk() {
    let rig = rig();
    let dir = tempfile::tempdir().unwrap();
    let path = fs::canonicalize(dir.path()).unwrap().join("a.img");
    fs::write(&path, vec![0; 1 << 20]).unwrap();
    let mut raw = Raw::ready(&rig);
    let open = |write| OwnedFd::from(File::options().read(true).write(write).open(&path).unwrap());
    raw.add(open(false));
    let add = "{'execute': 'disk-add', 'arguments': {'name': 'd', 'file': '/dev/fdset/0'}}";
    let said = raw.ask(add);
    assert!(desc(&said).contains("O_RDWR") && desc(&said).contains("readonly"), "{said}");
    let node = "{'execute': 'blockdev-add', 'arguments': {'driver': 'raw', 'node-name': 'd', 'read-only': true, \
        'file': {'driver': 'file', 'filename': '/dev/fdset/0'}}}";
    assert_eq!(raw.ask(node)["return"], json!({}));
    raw.ask("{'execute': 'blockdev-del', 'arguments': {'node-name': 'd'}}");
    raw.pass("{'execute': 'add-fd', 'arguments': {'fdset-id': 0}}", &[open(true)]);
    raw.read();
    assert_eq!(raw.ask(add)["return"], json!({}));
    let disks = raw.ask("{'execute': 'query-disks'}");
    assert_eq!(disks["return"][0]["file"], path.to_str().unwrap());
    let of_disk = open_of(&path) - 2;
    // Removed descriptors are not listed. They stay open as long as the disk has the file.
    raw.ask("{'execute': 'remove-fd', 'arguments': {'fdset-id': 0}}");
    assert_eq!((raw.sets(), open_of(&path)), (json!([]), of_disk + 2));
    raw.add(open(true));
    raw.ask("{'execute': 'remove-fd', 'arguments': {'fdset-id': 0}}");
    assert_eq!(open_of(&path), of_disk + 2, "one of each access mode");
    raw.ask("{'execute': 'disk-remove', 'arguments': {'name': 'd'}}");
    assert_eq!(open_of(&path), 0);
    assert!(desc(&raw.ask(add)).contains("no fd set"));
    let fd = open(true);
    fs::remove_file(&path).unwrap();
    raw.add(fd);
    assert!(desc(&raw.ask(add)).contains("--allow-path"));
    rig.server.stop();
}

/// Otherwise the daemon would keep the connection open itself, and it would count as a client for
/// ever.
#[test]
fn a_client_that_passes_its_own_end_is_gone_when_it_goes() {
    let rig = rig();
    for negotiated in [false, true] {
        // An unfinished message keeps a descriptor until its end.
        for text in ["{", "{'execute': 'add-fd'}", "{'execute': 'add-fd'} {"] {
            let raw = if negotiated { Raw::ready(&rig) } else { Raw::connect(&rig) };
            let own = raw.0.get_ref().try_clone().unwrap();
            raw.pass(text, &[own.into()]);
            drop(raw);
        }
    }
    let until = Instant::now() + Duration::from_secs(60);
    while !rig.server.shared.lock().map.is_empty() {
        assert!(Instant::now() < until, "a client is kept");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut raw = Raw::ready(&rig);
    assert_eq!(raw.sets(), json!([]));
    // Another socket is refused, too.
    let (_far, near) = UnixStream::pair().unwrap();
    assert_eq!(desc(&raw.add(near.into())), "No file descriptor supplied via SCM_RIGHTS");
    rig.server.stop();
}
