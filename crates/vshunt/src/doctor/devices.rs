//! Device files: FUSE, taps, the kernel engine, KVM.
//!
//! The kernel loads a module if its device file is opened. So a device is opened only if its driver
//! is there already.

use std::fs::{File, OpenOptions, read_to_string};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use vshunt_fuse::mount::{find_helper, may_allow_other};
use vshunt_sandbox::CapabilitySet;

use super::Finding;
use super::system::has;

/// The drivers of devices with a number of their own.
const DRIVERS: &str = "/proc/misc";
/// A program with this bit runs as its owner.
const SET_USER_ID: u32 = 0o4000;

pub(super) fn checks() -> Vec<Finding> {
    let drivers = read_to_string(DRIVERS).unwrap_or_default();
    let access = |path: &str, driver| access(Path::new(path), driver, &drivers);
    let fuse = access("/dev/fuse", "fuse");
    let uring = match fuse {
        Access::Open => vshunt_fuse::check_uring(),
        _ => Err("the module fuse cannot be used".to_owned()),
    };
    vec![
        fuse_device(fuse),
        fuse_uring(uring),
        fuse_mount(has(CapabilitySet::SYS_ADMIN), &helper(), may_allow_other()),
        tun(access("/dev/net/tun", "tun"), vshunt_tap::probe),
        net_admin(has(CapabilitySet::NET_ADMIN)),
        kernel_engine(
            "vhost-net",
            access("/dev/vhost-net", "vhost-net"),
            "networks on a tap",
            "modprobe vhost_net",
        ),
        kernel_engine(
            "vhost-blk",
            access("/dev/vhost-blk", "vhost-blk"),
            "disks",
            "install the package vhost-blk-dkms or build kmod/vhost_blk, then modprobe vhost_blk",
        ),
        kvm(access("/dev/kvm", "kvm")),
    ]
}

/// What became of an attempt to open a device.
#[derive(Debug)]
enum Access {
    Open,
    /// There is no such file.
    NoFile,
    /// The file is there, and its driver is not. To open the file would load the driver.
    NoDriver,
    Refused(io::Error),
}

/// Opens a device for reading and writing, if its driver is among `drivers`, and closes it.
fn access(path: &Path, driver: &str, drivers: &str) -> Access {
    if let Err(e) = std::fs::metadata(path) {
        return match e.kind() {
            io::ErrorKind::NotFound => Access::NoFile,
            _ => Access::Refused(e),
        };
    }
    // A line has a number and a name.
    if !drivers.lines().any(|line| line.split_whitespace().nth(1) == Some(driver)) {
        return Access::NoDriver;
    }
    let opened: io::Result<File> =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path);
    opened.map_or_else(Access::Refused, |_| Access::Open)
}

/// Returns what was found and the remedy, if the device cannot be used. `module` is what `modprobe`
/// takes.
fn unusable(access: &Access, path: &str, module: &str) -> Option<(String, String)> {
    Some(match access {
        Access::Open => return None,
        Access::NoFile => (
            format!("there is no {path}"),
            format!("as root: modprobe {module}; for a container: --device {path}"),
        ),
        Access::NoDriver => (
            format!("{path} is there, and the module {module} is not loaded"),
            format!("as root: modprobe {module} (the kernel also tries that when vshunt opens the file)"),
        ),
        Access::Refused(e) => (
            format!("{path} cannot be opened: {e}"),
            format!(
                "run vshunt as root or as a member of the group of {path} (ls -l {path}); in a container: --device {path}"
            ),
        ),
    })
}

/// A finding about a device that cannot be used: a warning if only its module is not loaded.
fn without(
    check: &'static str,
    access: &Access,
    (found, remedy): (String, String),
    meaning: &str,
) -> Finding {
    let finding = match access {
        Access::NoDriver => Finding::warning(check, found, meaning),
        _ => Finding::missing(check, found, meaning),
    };
    finding.remedy(remedy)
}

fn fuse_device(access: Access) -> Finding {
    match unusable(&access, "/dev/fuse", "fuse") {
        None => Finding::ok(
            "fuse",
            "/dev/fuse can be opened",
            "`vshunt mount` and exports with type=fuse have it.",
        ),
        Some(unusable) => without(
            "fuse",
            &access,
            unusable,
            "Without it there is no `vshunt mount` and no export with type=fuse.",
        ),
    }
}

fn fuse_uring(checked: Result<(), String>) -> Finding {
    const MEANING: &str = "FUSE mounts with transport=auto use channels of /dev/fuse.";
    let Err(why) = checked else {
        return Finding::ok("fuse-io_uring", "it is switched on", "FUSE mounts use transport=io_uring.");
    };
    // The message of the crate names the remedy after the reason.
    let (found, remedy) = match why.split_once("; ") {
        Some((found, remedy)) if found.contains("switched off") => {
            (found, format!("{remedy}; for good: options fuse enable_uring=1 in /etc/modprobe.d/fuse.conf"))
        }
        Some((found, remedy)) => (found, remedy.to_owned()),
        None if why.contains("6.14") => (why.as_str(), "boot Linux 6.14 or newer".to_owned()),
        None => (why.as_str(), "see the check fuse".to_owned()),
    };
    Finding::warning("fuse-io_uring", found, MEANING).remedy(remedy)
}

/// fusermount3 on this host.
#[derive(Debug)]
enum Helper {
    None,
    /// It is not set-user-id root.
    Powerless(String),
    Works(String),
}

fn helper() -> Helper {
    let Some(path) = find_helper() else { return Helper::None };
    let shown = path.display().to_string();
    match path.metadata() {
        Ok(meta) if meta.uid() == 0 && meta.mode() & SET_USER_ID != 0 => Helper::Works(shown),
        _ => Helper::Powerless(shown),
    }
}

fn fuse_mount(is_admin: bool, helper: &Helper, may_allow_other: bool) -> Finding {
    const CHECK: &str = "fuse-mount";
    const NONE: &str = "This user cannot mount: no `vshunt mount`, no export with type=fuse.";
    if is_admin {
        return Finding::ok(CHECK, "this user may mount (CAP_SYS_ADMIN)", "Mounts can be open to all users.");
    }
    match helper {
        Helper::None => Finding::missing(CHECK, "neither CAP_SYS_ADMIN nor fusermount3 is there", NONE)
            .remedy("install the package fuse3, or run vshunt as root"),
        Helper::Powerless(path) => Finding::missing(CHECK, format!("{path} is not set-user-id root"), NONE)
            .remedy(format!("as root: chmod u+s {path}; or install the package fuse3 again")),
        Helper::Works(path) if may_allow_other => {
            Finding::ok(CHECK, format!("{path}, with user_allow_other"), "Mounts can be open to other users.")
        }
        Helper::Works(path) => Finding::warning(
            CHECK,
            format!("{path}; user_allow_other is not in /etc/fuse.conf"),
            "Only this user and its programs can open the mounted file. allow-other=on is refused.",
        )
        .remedy("as root: echo user_allow_other >>/etc/fuse.conf"),
    }
}

fn tun(access: Access, probe: impl FnOnce() -> Result<bool, vshunt_tap::Error>) -> Finding {
    const NONE: &str = "Without it there is no type=tap network and no uplink. A switch needs none.";
    if let Some(unusable) = unusable(&access, "/dev/net/tun", "tun") {
        return without("tun", &access, unusable, NONE);
    }
    match probe() {
        Ok(true) => {
            Finding::ok("tun", "taps with several queues", "type=tap networks can have several queue pairs.")
        }
        Ok(false) => {
            Finding::warning("tun", "taps have one queue", "type=tap networks have one queue pair: queues=1.")
                .remedy("boot a kernel whose module tun knows IFF_MULTI_QUEUE (Linux 3.8)")
        }
        Err(e) => Finding::missing("tun", e.to_string(), NONE).remedy("see the error"),
    }
}

fn net_admin(may: bool) -> Finding {
    match may {
        true => Finding::ok("net-admin", "CAP_NET_ADMIN", "vshunt can make taps, and change existing ones."),
        false => Finding::warning(
            "net-admin",
            "no CAP_NET_ADMIN",
            "vshunt cannot make a tap. It can use one that was made for this user, or whose descriptors are \
             passed (fd=N).",
        )
        .remedy(
            "as root: ip tuntap add dev NAME mode tap user USER multi_queue vnet_hdr; or \
             AmbientCapabilities=CAP_NET_ADMIN in the unit",
        ),
    }
}

fn kernel_engine(check: &'static str, access: Access, what: &str, get: &str) -> Finding {
    let path = format!("/dev/{check}");
    match unusable(&access, &path, &check.replace('-', "_")) {
        None => Finding::ok(
            check,
            format!("{path} can be opened"),
            format!("engine=kernel and engine=auto have it for {what}."),
        ),
        Some((found, remedy)) => {
            let remedy = match access {
                Access::NoFile => format!("as root: {get}; in a container also: --device {path}"),
                _ => remedy,
            };
            let meaning = format!(
                "engine=kernel is refused for {what}. engine=user, the default, and engine=auto do without it."
            );
            without(check, &access, (found, remedy), &meaning)
        }
    }
}

fn kvm(access: Access) -> Finding {
    let remedy = match &access {
        Access::Refused(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            "add the user of the VMM to the group of the device, and log in again: usermod -aG kvm USER \
             (ls -l /dev/kvm shows the group)"
        }
        _ => "switch on virtualization in the firmware or in the outer VM, and load kvm_intel or kvm_amd",
    };
    match unusable(&access, "/dev/kvm", "kvm_intel or kvm_amd") {
        None => Finding::ok(
            "kvm",
            "/dev/kvm can be opened",
            "VMMs of this user can use KVM. vshunt itself does not need it.",
        ),
        Some((found, _)) => Finding::warning(
            "kvm",
            found,
            "VMMs of this user run guests by emulation, which is slow. vshunt itself does not need KVM.",
        )
        .remedy(remedy),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    fn refused() -> Access {
        Access::Refused(io::Error::from_raw_os_error(libc::EACCES))
    }

    #[test]
    fn a_device_without_its_driver_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tun");
        assert!(matches!(access(&path, "tun", "200 tun\n"), Access::NoFile));
        // A folder cannot be opened for writing, so an attempt would show.
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(access(&path, "tun", "200 tunnel\n 11 vtun\ntun\n"), Access::NoDriver));
        assert!(matches!(access(&path, "tun", "237 loop-control\n200 tun\n"), Access::Refused(_)));
        assert!(matches!(access(&path.join("x/y"), "tun", ""), Access::NoFile));
        assert!(matches!(access(Path::new("/dev/null"), "null", "1 null\n"), Access::Open));
    }

    #[test]
    fn missing_devices_name_the_option_and_the_remedy() {
        let finding = fuse_device(Access::NoFile);
        assert_eq!(finding.status, Status::Missing);
        assert!(finding.meaning.contains("type=fuse") && finding.remedy.unwrap().contains("modprobe fuse"));
        let finding = tun(Access::NoDriver, || panic!("this would load the module"));
        assert_eq!((finding.status, finding.required), (Status::Warning, false));
        let finding = tun(refused(), || panic!("it cannot be opened"));
        assert!(finding.found.contains("Permission denied") && finding.meaning.contains("type=tap"));
        assert_eq!(tun(Access::Open, || Ok(false)).status, Status::Warning);
        assert_eq!(tun(Access::Open, || Ok(true)).status, Status::Ok);
        let finding = kernel_engine("vhost-blk", Access::NoFile, "disks", "modprobe vhost_blk");
        assert!(
            finding.meaning.contains("engine=kernel")
                && finding.remedy.unwrap().contains("modprobe vhost_blk")
        );
        assert_eq!(kernel_engine("vhost-net", Access::Open, "networks", "").status, Status::Ok);
        assert_eq!([kvm(refused()), kvm(Access::NoFile)].map(|finding| finding.status), [Status::Warning; 2]);
        let remedy = |access| kvm(access).remedy.unwrap_or_default();
        assert!(
            remedy(refused()).contains("usermod -aG kvm USER") && !remedy(refused()).contains("firmware")
        );
        assert!(remedy(Access::NoFile).contains("firmware") && !remedy(Access::NoFile).contains("usermod"));
        assert!(net_admin(false).remedy.unwrap().contains("multi_queue"));
    }

    #[test]
    fn a_user_who_is_not_root_needs_fusermount3() {
        let works = || Helper::Works("/usr/bin/fusermount3".into());
        assert_eq!(fuse_mount(true, &Helper::None, false).status, Status::Ok);
        let finding = fuse_mount(false, &Helper::None, true);
        assert_eq!(finding.status, Status::Missing);
        assert!(finding.remedy.unwrap().contains("fuse3"));
        let finding = fuse_mount(false, &Helper::Powerless("/bin/fusermount3".into()), true);
        assert!(finding.remedy.unwrap().contains("chmod u+s /bin/fusermount3"));
        let finding = fuse_mount(false, &works(), false);
        assert_eq!(finding.status, Status::Warning);
        assert!(finding.remedy.unwrap().contains("user_allow_other"));
        assert_eq!(fuse_mount(false, &works(), true).status, Status::Ok);
    }

    #[test]
    fn reasons_against_fuse_over_io_uring_are_split_from_their_remedies() {
        assert_eq!(fuse_uring(Ok(())).status, Status::Ok);
        for (why, found, remedy) in [
            ("it is switched off; root can: echo Y >/x", "it is switched off", "/etc/modprobe.d/"),
            ("no CPU 1; ask for transport=io_uring", "no CPU 1", "transport=io_uring"),
            ("none (Linux 6.14 or newer)", "none (Linux 6.14 or newer)", "boot Linux 6.14"),
            ("the module fuse cannot be used", "the module", "check fuse"),
        ] {
            let finding = fuse_uring(Err(why.into()));
            assert!(finding.found.starts_with(found) && finding.remedy.unwrap().contains(remedy), "{why}");
        }
    }
}
