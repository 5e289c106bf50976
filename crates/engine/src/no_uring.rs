//! Why the system refuses an io_uring, and what helps.

use std::fs::read_to_string;
use std::io;

const DISABLED: &str = "/proc/sys/kernel/io_uring_disabled";

/// Who may have an io_uring, by `kernel.io_uring_disabled`.
#[derive(Clone, Debug)]
pub enum UringSetting {
    /// The value: 0, 1 or 2.
    Is(String),
    /// The kernel has no such setting: it is older than 6.6.
    Missing,
    /// It cannot be read, as in the daemon's sandbox.
    Unknown,
}

impl UringSetting {
    /// Reads it.
    pub fn read() -> Self {
        match read_to_string(DISABLED) {
            Ok(text) => Self::Is(text.trim().to_owned()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Self::Missing,
            Err(_) => Self::Unknown,
        }
    }
}

/// Returns the reason for the error of an attempt to set up or enter an io_uring, and a remedy.
pub fn why_no_uring(e: &io::Error, setting: &UringSetting) -> (String, &'static str) {
    let disabled = match setting {
        UringSetting::Is(value) => value.as_str(),
        UringSetting::Missing | UringSetting::Unknown => "",
    };
    match (e.raw_os_error(), disabled) {
        (Some(libc::EPERM), "2") => {
            ("kernel.io_uring_disabled is 2".to_owned(), "as root: sysctl kernel.io_uring_disabled=0")
        }
        (Some(libc::EPERM), "1") if !rustix::process::geteuid().is_root() => (
            "kernel.io_uring_disabled is 1, and this user is neither root nor in kernel.io_uring_group"
                .to_owned(),
            "as root: sysctl kernel.io_uring_disabled=0, or kernel.io_uring_group=GID of a group of this user",
        ),
        (Some(libc::EPERM), _) if disabled == "1" || matches!(setting, UringSetting::Unknown) => (
            "kernel.io_uring_disabled or the seccomp filter of a container refuses it".to_owned(),
            "as root: sysctl kernel.io_uring_disabled=0; or permit io_uring_setup, io_uring_enter and \
             io_uring_register in the container's seccomp profile",
        ),
        (Some(libc::EPERM | libc::EACCES), _) => (
            format!(
                "refused ({e}), and not by kernel.io_uring_disabled: probably by the seccomp filter of a container"
            ),
            "permit io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile \
             (podman, docker: --security-opt seccomp=FILE)",
        ),
        (Some(libc::ENOSYS), _) => (
            "the kernel has no io_uring, or a seccomp filter hides it".to_owned(),
            "boot a kernel with CONFIG_IO_URING, or permit io_uring_setup, io_uring_enter and \
             io_uring_register in the container's seccomp profile",
        ),
        (Some(libc::EINVAL), _) => {
            ("the kernel's io_uring lacks what workers use".to_owned(), "boot Linux 6.1 or newer")
        }
        (Some(libc::ENOMEM), _) => (
            format!("no memory for an io_uring ({e})"),
            "raise the limit of locked memory (ulimit -l, LimitMEMLOCK=) or of the control group (MemoryMax=)",
        ),
        (Some(libc::EMFILE), _) => (
            format!("no descriptor for an io_uring ({e})"),
            "raise the limit of open files: ulimit -n, LimitNOFILE=",
        ),
        _ => (format!("no io_uring can be set up: {e}"), "see `man io_uring_setup` for this error"),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn root_is_exempt_from_a_setting_of_1() {
        let one = UringSetting::Is("1".to_owned());
        let (why, _) = why_no_uring(&io::Error::from_raw_os_error(libc::EPERM), &one);
        let said =
            if rustix::process::geteuid().is_root() { "seccomp filter" } else { "kernel.io_uring_group" };
        assert!(why.contains(said), "{why}");
    }

    #[test]
    fn each_reason_has_its_remedy() {
        let is = |value: &str| UringSetting::Is(value.to_owned());
        let (missing, unknown) = (UringSetting::Missing, UringSetting::Unknown);
        for (errno, setting, found, remedy) in [
            (libc::EPERM, is("2"), "io_uring_disabled is 2", "sysctl kernel.io_uring_disabled=0"),
            (libc::EPERM, is("0"), "seccomp filter", "--security-opt seccomp="),
            (libc::EPERM, missing, "seccomp filter", "--security-opt seccomp="),
            (libc::EPERM, unknown.clone(), "or the seccomp filter", "seccomp profile"),
            (libc::ENOSYS, unknown, "has no io_uring", "CONFIG_IO_URING"),
            (libc::EINVAL, is("0"), "lacks what workers use", "6.1"),
            (libc::ENOMEM, is("0"), "no memory", "LimitMEMLOCK="),
            (libc::EMFILE, is("0"), "no descriptor", "LimitNOFILE="),
            (libc::EIO, is("0"), "os error 5", "man io_uring_setup"),
        ] {
            let (why, what) = why_no_uring(&io::Error::from_raw_os_error(errno), &setting);
            assert!(why.contains(found) && what.contains(remedy), "{errno} {setting:?}: {why}; {what}");
        }
    }
}
