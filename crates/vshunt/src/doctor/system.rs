//! The kernel, io_uring, Landlock, limits and CPUs.

use std::fs::read_to_string;
use std::io;
use std::path::Path;

use io_uring::IoUring;
use rustix::fs::Access;
use rustix::process::{Resource, getrlimit};
use vshunt_engine::{Uring, UringSetting, allowed_cpus, why_no_uring};
use vshunt_sandbox::{CapabilitySet, landlock_version};
use vshunt_types::spec::cpu_list;

use super::Finding;

const RELEASE: &str = "/proc/sys/kernel/osrelease";
const ONLINE: &str = "/sys/devices/system/cpu/online";
/// Map journals of qcow2 images are in this folder.
const JOURNALS: &str = "/dev/shm";

/// The first version of Linux that is tested.
const LINUX_MIN: (u32, u32) = (6, 1);
/// What needs a later version, ascending.
const LATER: [((u32, u32), &str); 4] = [
    ((6, 2), "USO on taps"),
    ((6, 4), "taps through io_uring (before, by system calls)"),
    ((6, 9), "passthrough of FUSE mounts"),
    ((6, 14), "transport=io_uring of FUSE mounts"),
];
/// Landlock restricts ioctl on devices since this version of its interface.
const LANDLOCK_ALL: u32 = 5;
/// Descriptors with which a daemon can start and serve a disk of one queue.
const FILES_MIN: u64 = 64;
/// Descriptors for some disks of many queues each.
const FILES_MANY: u64 = 4096;
/// The limit of locked memory that systemd and Linux 5.16 set, in bytes.
const MEMLOCK_USUAL: u64 = 8 << 20;

pub(super) fn checks() -> Vec<Finding> {
    vec![
        kernel(read_to_string(RELEASE).unwrap_or_default().trim()),
        ring(try_ring(), &UringSetting::read()),
        landlock(landlock_version()),
        files(getrlimit(Resource::Nofile).maximum),
        locked(getrlimit(Resource::Memlock).maximum, has(CapabilitySet::IPC_LOCK)),
        cpus(&allowed_cpus(), read_to_string(ONLINE).ok().as_deref()),
        journals(Path::new(JOURNALS)),
    ]
}

/// Whether this process has the capability.
pub(super) fn has(capability: CapabilitySet) -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(capability))
}

/// Returns the first two numbers of a version.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

fn kernel(release: &str) -> Finding {
    let found = format!("Linux {release}");
    let lacks = |has: (u32, u32)| {
        let later = LATER.iter().filter(|(since, _)| has < *since);
        later.map(|((major, minor), what)| format!("{what}: {major}.{minor}")).collect::<Vec<_>>()
    };
    match version(release) {
        Some(has) if has >= LINUX_MIN => match lacks(has) {
            lacks if lacks.is_empty() => {
                Finding::ok("kernel", found, "No feature of vshunt needs a later version.")
            }
            lacks => {
                let meaning = format!("Features that need a later version: {}.", lacks.join("; "));
                Finding::ok("kernel", found, meaning)
            }
        },
        _ => Finding::warning(
            "kernel",
            found,
            "vshunt is tested with Linux 6.1 and newer. See docs/assumptions.md.",
        )
        .remedy("boot Linux 6.1 or newer"),
    }
}

/// Sets up an io_uring as a worker does, and enters one.
fn try_ring() -> io::Result<()> {
    Uring::new()?;
    IoUring::new(1)?.submit().map(drop)
}

fn ring(tried: io::Result<()>, setting: &UringSetting) -> Finding {
    let Err(e) = tried else {
        return Finding::ok("io_uring", "an io_uring was set up and entered", "Workers can serve requests.")
            .required();
    };
    let (found, remedy) = why_no_uring(&e, setting);
    let meaning = "Each worker needs an io_uring: no disk and no network can be served.";
    Finding::missing("io_uring", found, meaning).remedy(remedy).required()
}

fn landlock(version: u32) -> Finding {
    match version {
        0 => Finding::warning(
            "landlock",
            "the kernel has no Landlock, or it is switched off",
            "The sandbox does not restrict which files the daemon's threads may open. Its other restrictions hold.",
        )
        .remedy("boot a kernel with CONFIG_SECURITY_LANDLOCK, and `landlock` in the boot parameter lsm="),
        1..LANDLOCK_ALL => Finding::ok(
            "landlock",
            format!("interface version {version}"),
            "The sandbox restricts files. It does not restrict ioctl on devices, which needs version 5.",
        ),
        _ => Finding::ok("landlock", format!("interface version {version}"), "The sandbox restricts files."),
    }
}

fn files(hard: Option<u64>) -> Finding {
    let found = hard.map_or("no hard limit".to_owned(), |limit| format!("the hard limit is {limit}"));
    let remedy = "raise the hard limit: LimitNOFILE= in the unit, or /etc/security/limits.conf";
    let finding = match hard {
        Some(limit) if limit < FILES_MIN => {
            Finding::missing("open-files", found, "These are too few descriptors for a daemon and a guest.").remedy(remedy)
        }
        Some(limit) if limit < FILES_MANY => Finding::warning(
            "open-files",
            found,
            "The daemon raises its limit to this one. A guest's queue needs three descriptors, so many exports \
             with many queues need more.",
        )
        .remedy(remedy),
        _ => Finding::ok("open-files", found, "The daemon raises its limit of open files to this one."),
    };
    finding.required()
}

fn locked(hard: Option<u64>, exempt: bool) -> Finding {
    const CHECK: &str = "locked-memory";
    match hard {
        _ if exempt => {
            Finding::ok(CHECK, "no limit for this user (CAP_IPC_LOCK)", "Workers can have io_urings.")
        }
        None => Finding::ok(CHECK, "no limit", "Workers can have io_urings."),
        Some(limit) if limit < MEMLOCK_USUAL => Finding::warning(
            CHECK,
            format!("the hard limit is {} KiB", limit >> 10),
            "Kernels that count the memory of an io_uring against this limit permit few workers.",
        )
        .remedy("raise the limit to 8 MiB: ulimit -l, LimitMEMLOCK=8M"),
        Some(limit) => Finding::ok(
            CHECK,
            format!("the hard limit is {} KiB", limit >> 10),
            "Workers can have io_urings.",
        ),
    }
}

fn cpus(allowed: &[usize], online: Option<&str>) -> Finding {
    let online = online.map(vshunt_fuse::cpus_of);
    let others = online.iter().flatten().any(|cpu| !allowed.contains(cpu));
    let found = match allowed.len() {
        1 => format!("vshunt may use one CPU ({})", cpu_list(allowed)),
        count => format!("vshunt may use {count} CPUs ({})", cpu_list(allowed)),
    };
    if others {
        return Finding::warning(
            "cpus",
            format!("{found}; others are online"),
            "Workers run on these CPUs only, and --cpu takes no other. FUSE mounts with transport=auto use \
             channels of /dev/fuse.",
        )
        .remedy("if that is not intended: AllowedCPUs= or CPUAffinity= of the unit, --cpuset-cpus of the container, taskset");
    }
    let meaning = match allowed.len() {
        1 => "Several workers serve no faster than one here.",
        _ => "Workers can run on all of them.",
    };
    Finding::ok("cpus", found, meaning)
}

fn journals(folder: &Path) -> Finding {
    let shown = folder.display();
    match rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK) {
        Ok(()) => Finding::ok(
            "journals",
            format!("{shown} can be written"),
            "If the daemon is killed, qcow2 images lose no completed write.",
        ),
        Err(e) => Finding::warning(
            "journals",
            format!("{shown} cannot be written: {}", io::Error::from(e)),
            "If the daemon is killed, writes to qcow2 images since the last flush are lost.",
        )
        .remedy(format!("as root: mount -t tmpfs -o mode=1777 tmpfs {shown}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    fn error(errno: i32) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(errno))
    }

    #[test]
    fn an_older_kernel_is_told_what_it_lacks() {
        assert_eq!(version("6.1.0-28-amd64"), Some((6, 1)));
        assert_eq!((version("6"), version(""), version("linux-6.1")), (None, None, None));
        assert!(kernel("6.18.44").meaning.starts_with("No feature"));
        let debian = kernel("6.1.0-28-amd64");
        assert_eq!(debian.status, Status::Ok);
        assert!(
            debian.meaning.contains("USO on taps: 6.2; ") && debian.meaning.contains("6.14"),
            "{debian:?}"
        );
        assert!(!kernel("6.9.1").meaning.contains("passthrough"));
        for release in ["5.15.0", "6.0.19", "99999999999999.1", "?"] {
            assert_eq!(kernel(release).status, Status::Warning, "{release}");
        }
    }

    #[test]
    fn an_io_uring_that_is_refused_is_missing() {
        assert_eq!(ring(try_ring(), &UringSetting::Missing).status, Status::Ok);
        let finding = ring(error(libc::EPERM), &UringSetting::Is("2".to_owned()));
        assert_eq!((finding.status, finding.required), (Status::Missing, true));
        assert!(finding.remedy.is_some_and(|it| it.contains("sysctl kernel.io_uring_disabled=0")));
    }

    #[test]
    fn low_limits_are_named() {
        let status = |limit| files(limit).status;
        assert_eq!([None, Some(4096), Some(u64::MAX)].map(status), [Status::Ok; 3]);
        assert_eq!([Some(64), Some(4095)].map(status), [Status::Warning; 2]);
        assert_eq!([Some(0), Some(63)].map(status), [Status::Missing; 2]);
        assert_eq!(locked(Some(64 << 10), false).status, Status::Warning);
        for (limit, exempt) in [(Some(0), true), (None, false), (Some(8 << 20), false)] {
            assert_eq!(locked(limit, exempt).status, Status::Ok);
        }
        assert_eq!(
            [0, 1, 4, 5, 99].map(|version| landlock(version).status == Status::Ok),
            [false, true, true, true, true]
        );
    }

    #[test]
    fn cpus_that_may_not_be_used_are_noticed() {
        assert_eq!(cpus(&[0, 1], Some("0-1\n")).status, Status::Ok);
        assert_eq!(cpus(&[0, 1], None).status, Status::Ok);
        assert!(cpus(&[3], Some("3\n")).found.contains("one CPU (3)"));
        let finding = cpus(&[1, 2], Some("0-3\n"));
        assert_eq!(finding.status, Status::Warning);
        assert!(finding.found.contains("2 CPUs (1-2)") && finding.remedy.is_some());
    }

    #[test]
    fn a_missing_folder_for_journals_is_named() {
        assert_eq!(journals(&std::env::temp_dir()).status, Status::Ok);
        let finding = journals(Path::new("/nonexistent/shm"));
        assert_eq!(finding.status, Status::Warning);
        assert!(finding.found.contains("/nonexistent/shm"));
    }
}
