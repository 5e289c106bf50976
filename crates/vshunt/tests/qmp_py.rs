//! The control socket under QEMU's own Python client. Needs python3 and the PyPI package qemu.qmp;
//! says so and passes where they cannot be had. VSHUNT_QMP_PYTHON names an interpreter that has the
//! package.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

/// What the test was written against.
const PACKAGE: &str = "qemu.qmp==0.0.6";

fn has_package(python: &Path) -> bool {
    let run = Command::new(python).args(["-c", "import qemu.qmp"]).output();
    run.is_ok_and(|o| o.status.success())
}

fn succeeds(command: &mut Command) -> Result<(), String> {
    match command.output() {
        Ok(o) if o.status.success() => Ok(()),
        Ok(o) => Err(String::from_utf8_lossy(&o.stderr).lines().last().unwrap_or("failed").to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

/// An interpreter with the package: the one named, the system's, or one in a virtual environment
/// made for it.
fn python() -> Result<PathBuf, String> {
    if let Some(python) = std::env::var_os("VSHUNT_QMP_PYTHON") {
        return Ok(python.into());
    }
    let system = PathBuf::from("python3");
    if has_package(&system) {
        return Ok(system);
    }
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("qmp-venv");
    let python = venv.join("bin/python3");
    if !has_package(&python) {
        succeeds(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--timeout", "10"];
        succeeds(Command::new(&python).args(pip).args(["--retries", "1", PACKAGE]))?;
    }
    Ok(python)
}

#[test]
fn qemus_own_client_is_served() {
    let python = match python() {
        Ok(python) => python,
        Err(why) => {
            eprintln!("skipped: no python3 with {PACKAGE}: {why}");
            return;
        }
    };
    let mut daemon = common::Daemon::start(&[]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/qmp_client.py");
    let (code, out, err) = common::output(Command::new(python).arg(script).arg(&daemon.control));
    assert_eq!((code, out.trim()), (0, "all good"), "{err}");
    assert_eq!(daemon.end().0, 0);
}
