//! What `vshunt serve FILE…` and `vshunt mount FILE` print on stdout when they are ready: the lines
//! to paste for each VMM, or the path of the mounted file.
//!
//! Called on the main thread. The text has a bound, because nothing may read stdout.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::process::geteuid;
use vshunt_types::spec::{DiskSpec, ExportKind, ExportSpec, Format};

use crate::config::Setup;

/// Disks in the lines at most: `vda` to `vdp`.
const DISKS_MAX: usize = 16;
/// Virtual CPUs, and queues, of the guest in the lines at most.
const CPUS_MAX: usize = 4;
/// Memory of the guest in the lines.
const MEMORY: &str = "4G";
/// A group of libvirt's QEMU on all distributions: it may use /dev/kvm.
const GROUP: &str = "kvm";
/// A folder for sockets of that group.
const GROUP_FOLDER: &str = "/run/vshunt-kvm";

/// Returns the text for stdout. Empty if no image was given without keys.
pub(super) fn text(setup: &Setup, quiet: bool) -> String {
    let of_images = || setup.exports.iter().filter(|export| setup.images.contains(&export.name));
    let mut text = String::new();
    // The path is the answer of the command; a script may need it.
    for path in of_images().filter_map(|export| export.mountpoint.as_ref()) {
        let _ = writeln!(text, "{}", path.display());
    }
    let disks: Vec<_> = of_images().filter(|export| export.kind == ExportKind::VhostUserBlk).collect();
    if !quiet && let Some(first) = disks.first() {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from).min(CPUS_MAX);
        let disk = setup.disks.iter().find(|disk| disk.name == first.disk).zip(first.socket.as_ref());
        let access = disk.map(|(disk, socket)| access(disk, socket, geteuid().is_root()));
        text.push_str(&lines(&disks, cpus, &access.unwrap_or_default()));
    }
    text
}

/// Returns the lines for all VMMs. The guest has as many virtual CPUs as each disk has queues.
/// `access`: the lines of [`access`].
fn lines(disks: &[&ExportSpec], cpus: usize, access: &str) -> String {
    let sockets: Vec<&Path> = disks.iter().filter_map(|disk| disk.socket.as_deref()).collect();
    let (shown, more) = sockets.split_at(sockets.len().min(DISKS_MAX));
    let mut text =
        format!("{}\n{}{access}\n{}", qemu(shown, cpus), libvirt(shown, cpus), cloud_hypervisor(shown, cpus));
    if !more.is_empty() {
        let _ = writeln!(
            text,
            "\nand {} more sockets, used in the same way; vshunt status lists them",
            more.len()
        );
    }
    text
}

/// Returns the commands by which a running daemon serves an image.
pub(crate) fn commands(disk: &DiskSpec, file: &Path, socket: &Path) -> [String; 2] {
    let [disk, export] = keys(disk, file, socket);
    [format!("  vshunt disk add {}", quoted(&disk)), format!("  vshunt export add {}", quoted(&export))]
}

/// Returns the keys of a disk and of its export.
fn keys(disk: &DiskSpec, file: &Path, socket: &Path) -> [String; 2] {
    // In a list of keys, a comma is written twice.
    let value = |path: &Path| path.display().to_string().replace(',', ",,");
    let name = &disk.name;
    let format = if disk.format() == Format::Qcow2 { ",format=qcow2" } else { "" };
    let readonly = if disk.readonly { ",readonly=on" } else { "" };
    [
        format!("name={name},file={}{format}{readonly}", value(file)),
        format!("type=vhost-user-blk,name={name},disk={name},socket={}", value(socket)),
    ]
}

/// Returns the lines after those for libvirt: how its QEMU gets access to a socket. The socket is
/// for the user of the daemon only, and libvirt's system instance runs QEMU as another user.
fn access(disk: &DiskSpec, socket: &Path, is_root: bool) -> String {
    let system = match is_root {
        true => "libvirt runs QEMU as",
        false => "The lines are for qemu:///session. With qemu:///system, QEMU runs as",
    };
    let folder = socket.parent().unwrap_or(socket);
    // Others may go through the folder: only the socket has to be given to the group.
    let is_open = std::fs::metadata(folder).is_ok_and(|meta| meta.permissions().mode() & 0o001 != 0);
    let (made, socket) = match is_open {
        true => (String::new(), socket.to_owned()),
        false => {
            let other = Path::new(GROUP_FOLDER);
            let socket = other.join(socket.file_name().unwrap_or_default());
            (format!("install -d -g {GROUP} -m 0750 {GROUP_FOLDER} &&\n    "), socket)
        }
    };
    let file = disk.file.clone().unwrap_or_default();
    let [disk, export] = keys(disk, &file, &socket);
    format!(
        "{system} another user, who may not use this socket. To give one to its group, and its path to <source>:\n    \
         {made}vshunt serve --disk {} \\\n    --export {}\n",
        quoted(&disk),
        quoted(&format!("{export},group={GROUP}")),
    )
}

fn qemu(sockets: &[&Path], cpus: usize) -> String {
    let mut text = format!(
        "QEMU:\n  qemu-system-x86_64 -accel kvm -accel tcg -smp {cpus} -m {MEMORY} \\\n    \
         -object memory-backend-memfd,id=mem,size={MEMORY},share=on -numa node,memdev=mem",
    );
    for (at, socket) in sockets.iter().enumerate() {
        // In a value of QEMU, a comma is written twice.
        let path = socket.display().to_string().replace(',', ",,");
        let _ = write!(
            text,
            " \\\n    -chardev {} \\\n    -device vhost-user-blk-pci,chardev=vd{at},num-queues={cpus}",
            quoted(&format!("socket,id=vd{at},path={path}"))
        );
    }
    // QEMU 9.1 and older know reconnect only, 9.2 knows both, and 10.0 and newer refuse it.
    text + "\n  To survive a restart of vshunt: -chardev …,reconnect=1 (since QEMU 9.2 reconnect-ms=1000)\n"
}

fn libvirt(sockets: &[&Path], cpus: usize) -> String {
    let mut text = "\
libvirt, in <domain>:
  <memoryBacking>
    <source type='memfd'/>
    <access mode='shared'/>
  </memoryBacking>
and in <devices>:
"
    .to_owned();
    for (socket, letter) in sockets.iter().zip('a'..='z') {
        let path = escaped(&socket.display().to_string());
        let _ = write!(
            text,
            "  \
  <disk type='vhostuser' device='disk'>
    <driver name='qemu' type='raw' queues='{cpus}'/>
    <source type='unix' path='{path}'>
      <reconnect enabled='yes' timeout='1'/>
    </source>
    <target dev='vd{letter}' bus='virtio'/>
  </disk>
"
        );
    }
    text
}

fn cloud_hypervisor(sockets: &[&Path], cpus: usize) -> String {
    let mut text = format!(
        "Cloud Hypervisor:\n  cloud-hypervisor --cpus boot={cpus} --memory size={MEMORY},shared=on \\\n    \
         --firmware hypervisor-fw \\\n    --disk"
    );
    for (at, socket) in sockets.iter().enumerate() {
        let path = socket.display().to_string();
        // A comma is part of a value in double quotes.
        let path = if path.contains(',') { format!("\"{path}\"") } else { path };
        let between = if at == 0 { " " } else { " \\\n      " };
        let disk = format!("vhost_user=true,socket={path},num_queues={cpus},queue_size=128");
        let _ = write!(text, "{between}{}", quoted(&disk));
    }
    text + "\n"
}

/// Returns a word as a POSIX shell reads it.
fn quoted(word: &str) -> Cow<'_, str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,=:@%+".contains(c);
    match word.chars().all(plain) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', r"'\''")).into(),
    }
}

/// Returns a text for an attribute in XML.
fn escaped(text: &str) -> String {
    let pairs = [("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&apos;"), ("\"", "&quot;")];
    pairs.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup(sockets: &[&str]) -> Setup {
        let export = |(at, socket): (usize, &&str)| ExportSpec {
            name: format!("d{at}"),
            socket: Some(socket.into()),
            ..ExportSpec::default()
        };
        let exports: Vec<_> = sockets.iter().enumerate().map(export).collect();
        Setup { images: exports.iter().map(|e| e.name.clone()).collect(), exports, ..Setup::default() }
    }

    #[test]
    fn a_disk_has_lines_for_each_vmm() {
        let setup = setup(&["/run/vshunt/disk.sock"]);
        let disks: Vec<_> = setup.exports.iter().collect();
        let want = "\
QEMU:
  qemu-system-x86_64 -accel kvm -accel tcg -smp 2 -m 4G \\
    -object memory-backend-memfd,id=mem,size=4G,share=on -numa node,memdev=mem \\
    -chardev socket,id=vd0,path=/run/vshunt/disk.sock \\
    -device vhost-user-blk-pci,chardev=vd0,num-queues=2
  To survive a restart of vshunt: -chardev …,reconnect=1 (since QEMU 9.2 reconnect-ms=1000)

libvirt, in <domain>:
  <memoryBacking>
    <source type='memfd'/>
    <access mode='shared'/>
  </memoryBacking>
and in <devices>:
  <disk type='vhostuser' device='disk'>
    <driver name='qemu' type='raw' queues='2'/>
    <source type='unix' path='/run/vshunt/disk.sock'>
      <reconnect enabled='yes' timeout='1'/>
    </source>
    <target dev='vda' bus='virtio'/>
  </disk>

Cloud Hypervisor:
  cloud-hypervisor --cpus boot=2 --memory size=4G,shared=on \\
    --firmware hypervisor-fw \\
    --disk vhost_user=true,socket=/run/vshunt/disk.sock,num_queues=2,queue_size=128
";
        assert_eq!(lines(&disks, 2, ""), want);
        assert!(text(&setup, false).starts_with("QEMU:\n"));
        assert_eq!(text(&setup, true), "");
        assert_eq!(text(&Setup { images: Vec::new(), ..setup }, false), "");
    }

    #[test]
    fn any_path_can_be_pasted() {
        let setup = setup(&["/a b/c,d/it's<&>.sock"]);
        let text = lines(&setup.exports.iter().collect::<Vec<_>>(), 1, "");
        for want in [
            r"-chardev 'socket,id=vd0,path=/a b/c,,d/it'\''s<&>.sock' \",
            "path='/a b/c,d/it&apos;s&lt;&amp;&gt;.sock'",
            r#"--disk 'vhost_user=true,socket="/a b/c,d/it'\''s<&>.sock",num_queues=1,queue_size=128'"#,
        ] {
            assert!(text.contains(want), "{want}: {text}");
        }
    }

    #[test]
    fn libvirt_is_told_how_its_qemu_gets_access() {
        let dir = tempfile::tempdir().unwrap();
        let disk = DiskSpec { name: "d".into(), file: Some("/a b.img".into()), ..DiskSpec::default() };
        let socket = dir.path().join("d.sock");
        let said = |mode| {
            std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(mode)).unwrap();
            access(&disk, &socket, true)
        };
        let want = "\
libvirt runs QEMU as another user, who may not use this socket. To give one to its group, and its path to <source>:
    install -d -g kvm -m 0750 /run/vshunt-kvm &&
    vshunt serve --disk 'name=d,file=/a b.img' \\
    --export type=vhost-user-blk,name=d,disk=d,socket=/run/vshunt-kvm/d.sock,group=kvm
";
        assert_eq!(said(0o700), want);
        let open = said(0o755);
        assert!(!open.contains("install") && open.contains("d.sock,group=kvm"), "{open}");
        assert!(access(&disk, &socket, false).starts_with("The lines are for qemu:///session. "));
    }

    #[test]
    fn many_disks_have_a_bound() {
        let setup = setup(&["/s"; 100]);
        let text = text(&setup, false);
        assert!(text.contains("dev='vdp'") && !text.contains("dev='vdq'"), "{text}");
        assert!(text.contains("and 84 more sockets") && text.len() < 16 << 10, "{}", text.len());
    }

    #[test]
    fn a_mounted_file_is_one_line_also_if_quiet() {
        let export = ExportSpec {
            kind: ExportKind::Fuse,
            name: "d".into(),
            mountpoint: Some("/run/vshunt/d.raw".into()),
            ..ExportSpec::default()
        };
        let setup = Setup { images: vec!["d".into()], exports: vec![export], ..Setup::default() };
        assert_eq!(text(&setup, true), "/run/vshunt/d.raw\n");
    }
}
