//! What `vshunt serve FILE…` and `vshunt mount FILE` print on stdout when they are ready: the lines
//! to paste for each VMM, or the path of the mounted file.
//!
//! Called on the main thread. The text has a bound, because nothing may read stdout.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::Path;

use vshunt_types::spec::{DiskSpec, ExportKind, ExportSpec, Format};

use crate::config::Setup;

/// Disks in the lines at most: `vda` to `vdp`.
const DISKS_MAX: usize = 16;
/// Virtual CPUs, and queues, of the guest in the lines at most.
const CPUS_MAX: usize = 4;
/// Memory of the guest in the lines.
const MEMORY: &str = "4G";

/// Returns the text for stdout. Empty if no image was given without keys.
pub(super) fn text(setup: &Setup, quiet: bool) -> String {
    let of_images = || setup.exports.iter().filter(|export| setup.images.contains(&export.name));
    let mut text = String::new();
    // The path is the answer of the command; a script may need it.
    for path in of_images().filter_map(|export| export.mountpoint.as_ref()) {
        let _ = writeln!(text, "{}", path.display());
    }
    let disks: Vec<_> = of_images().filter(|export| export.kind == ExportKind::VhostUserBlk).collect();
    if !quiet && !disks.is_empty() {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from).min(CPUS_MAX);
        text.push_str(&lines(&disks, cpus));
    }
    text
}

/// Returns the lines for all VMMs. The guest has as many virtual CPUs as each disk has queues.
fn lines(disks: &[&ExportSpec], cpus: usize) -> String {
    let sockets: Vec<&Path> = disks.iter().filter_map(|disk| disk.socket.as_deref()).collect();
    let (shown, more) = sockets.split_at(sockets.len().min(DISKS_MAX));
    let mut text =
        format!("{}\n{}\n{}", qemu(shown, cpus), libvirt(shown, cpus), cloud_hypervisor(shown, cpus));
    if !more.is_empty() {
        let _ = writeln!(
            text,
            "\nand {} more sockets, used in the same way; vshunt status lists them",
            more.len()
        );
    }
    text
}

/// Returns the commands by which a running daemon serves an image, each on a line of its own.
pub(super) fn commands(disk: &DiskSpec, file: &Path, socket: &Path) -> String {
    // In a list of keys, a comma is written twice.
    let value = |path: &Path| path.display().to_string().replace(',', ",,");
    let name = &disk.name;
    let format = if disk.format() == Format::Qcow2 { ",format=qcow2" } else { "" };
    let readonly = if disk.readonly { ",readonly=on" } else { "" };
    let keys = [
        ("disk", format!("name={name},file={}{format}{readonly}", value(file))),
        ("export", format!("type=vhost-user-blk,name={name},disk={name},socket={}", value(socket))),
    ];
    let line = |(what, keys): &(&str, String)| format!("\n  vshunt {what} add {}", quoted(keys));
    keys.iter().map(line).collect()
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
    // The key has another name since QEMU 9.2, and each version refuses one of the two.
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
        assert_eq!(lines(&disks, 2), want);
        assert!(text(&setup, false).starts_with("QEMU:\n"));
        assert_eq!(text(&setup, true), "");
        assert_eq!(text(&Setup { images: Vec::new(), ..setup }, false), "");
    }

    #[test]
    fn any_path_can_be_pasted() {
        let setup = setup(&["/a b/c,d/it's<&>.sock"]);
        let text = lines(&setup.exports.iter().collect::<Vec<_>>(), 1);
        for want in [
            r"-chardev 'socket,id=vd0,path=/a b/c,,d/it'\''s<&>.sock' \",
            "path='/a b/c,d/it&apos;s&lt;&amp;&gt;.sock'",
            r#"--disk 'vhost_user=true,socket="/a b/c,d/it'\''s<&>.sock",num_queues=1,queue_size=128'"#,
        ] {
            assert!(text.contains(want), "{want}: {text}");
        }
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
