//! A `vshunt serve` that a comparison starts for a measurement and ends again.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vshunt_guest::error::{Error, Kind, Result};
use vshunt_guest::fail;

/// Queues of the server.
pub(crate) const QUEUES: u16 = 16;
/// Time limit for a server to listen.
const START: Duration = Duration::from_secs(10);

/// Returns the path of the vshunt program.
pub(crate) fn program(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return match path.is_file() {
            true => Ok(path.to_owned()),
            false => Err(fail!(Usage, "--vshunt {}: no such file", path.display())),
        };
    }
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name("vshunt"));
    let in_path = std::env::var_os("PATH")
        .into_iter()
        .flat_map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
    let candidates = beside.into_iter().chain(in_path.map(|dir| dir.join("vshunt")));
    let found = candidates.into_iter().find(|path| path.is_file());
    found.ok_or_else(|| fail!(Usage, "no vshunt program beside this one or in PATH: give --vshunt PATH"))
}

/// A server that this program started. It ends when this is dropped.
pub(crate) struct Server {
    child: Child,
    vshunt: PathBuf,
    dir: PathBuf,
}

impl Server {
    /// Starts a server of a disk of `format` with [`QUEUES`] queues, which have one
    /// worker or one each, and waits until it listens.
    pub(crate) fn start(vshunt: &Path, format: &str, per_queue: bool) -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("vshunt-bench-{}", std::process::id()));
        std::fs::create_dir_all(&dir)
            .map_err(|e| Error::with(Kind::System, format!("cannot make {}", dir.display()), e))?;
        let workers = if per_queue { ",workers=per-queue" } else { "" };
        let socket = dir.join("vm0.sock");
        let _ = std::fs::remove_file(&socket);
        let export = format!(
            "type=vhost-user-blk,name=vm0,disk=d0,socket={},queues={QUEUES}{workers}",
            socket.display()
        );
        let child = Command::new(vshunt)
            .args([
                "serve",
                "--quiet",
                "--disk",
                &format!("name=d0,format={format},size=4G"),
                "--export",
                &export,
                "--control",
            ])
            .arg(dir.join("control.sock"))
            .stdout(Stdio::null())
            .spawn()
            .map_err(|e| Error::with(Kind::System, format!("cannot start {}", vshunt.display()), e))?;
        let mut server = Self { child, vshunt: vshunt.to_owned(), dir };
        server.wait_for(&socket)?;
        Ok(server)
    }

    /// Returns the path of its vhost-user socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("vm0.sock")
    }

    /// Returns its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn wait_for(&mut self, socket: &Path) -> Result<()> {
        let deadline = Instant::now() + START;
        while !listens(socket) {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(fail!(
                    Connect,
                    "vshunt serve ended at once ({status}); its message stands above"
                ));
            }
            if Instant::now() > deadline {
                return Err(fail!(Connect, "vshunt serve did not make its socket within {START:?}"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Runs the command line on the server's control socket. Returns its output.
    fn control(&self, args: &[&str]) -> Result<String> {
        let output =
            Command::new(&self.vshunt).arg("-c").arg(self.dir.join("control.sock")).args(args).output();
        let output = output.map_err(|e| Error::with(Kind::System, "cannot run vshunt", e))?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr);
            return Err(fail!(System, "vshunt {} failed: {}", args.join(" "), why.trim()));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Gives each queue its own worker, except the first queue, which stays on its worker.
    pub(crate) fn attach_workers(&self, jobs: u16) -> Result<()> {
        for queue in 1..jobs {
            let printed = self.control(&["worker", "new"])?;
            let id = printed.split(|c: char| !c.is_ascii_digit()).find(|word| !word.is_empty());
            let id = id.ok_or_else(|| fail!(System, "vshunt worker new printed no id but {printed:?}"))?;
            self.control(&["attach", &format!("vm0:{queue}"), id])?;
        }
        Ok(())
    }
}

/// Returns whether a process listens on a UNIX socket. Its file is there a moment before that.
fn listens(socket: &Path) -> bool {
    const LISTENS: &str = "00010000";
    let Ok(sockets) = std::fs::read_to_string("/proc/net/unix") else { return socket.exists() };
    // Address, references, protocol, flags, type, state, inode, path: proc(5).
    sockets.lines().any(|line| {
        line.split_whitespace().nth(3) == Some(LISTENS)
            && socket.to_str().is_some_and(|path| line.ends_with(&format!(" {path}")))
    })
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
