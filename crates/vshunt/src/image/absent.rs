//! Options and commands of qemu-img that `vshunt image` does not have, with the reason and what to
//! do.

/// An option of these commands, or of all if none is named.
struct Absent {
    commands: &'static [&'static str],
    names: &'static [&'static str],
    why: &'static str,
}

const ABSENT: &[Absent] = &[
    of(
        &["convert"],
        &["-B", "-b"],
        "a copy has the contents of the backing files; leave the backing file and -F out, or make an overlay with \
        `vshunt image create -b FILE -F FORMAT`",
    ),
    of(
        &["convert"],
        &["-F"],
        "it belongs to a backing file (-b, -B), and a copy has no backing file; leave it out",
    ),
    of(
        &["convert"],
        &["-S"],
        "zeroes never take space in a copy; leave it out, or give -o preallocation=full for a copy \
        without holes",
    ),
    of(&["convert"], &["-m", "-W"], "vshunt chooses the number and the order of requests; leave it out"),
    of(&["convert"], &["-C"], "vshunt chooses how data is copied; leave it out"),
    of(
        &["convert"],
        &["-r"],
        "a copy has no rate limit; leave it out, or let systemd limit it: systemd-run \
        -p IOWriteBandwidthMax=",
    ),
    of(
        &["convert"],
        &["-l"],
        "only the present contents are copied; apply the snapshot to a copy of the file first: \
        `vshunt image snapshot -a NAME FILE`",
    ),
    of(
        &["convert", "dd"],
        &["--salvage"],
        "a copy ends at the first error of a read; ddrescue reads what is left of a \
        damaged disk",
    ),
    of(&["rebase"], &["-c"], "clusters that are copied into the image are not compressed; leave it out"),
    of(
        &["rebase", "amend", "resize"],
        &["-U", "--force-share"],
        "an image that is written must not be in use; end its user \
        first",
    ),
    of(&["amend", "create", "resize"], &["--force"], "there is no check that it would skip; leave it out"),
    of(&["info"], &["--limits"], "vshunt does not show the limits of block devices; lsblk -t shows them"),
    of(
        &[],
        &["-t", "-T"],
        "vshunt chooses the caching, and syncs an image that it has written; leave it out",
    ),
    of(
        &[],
        &["--image-opts", "--target-image-opts"],
        "an image is the name of a file, with -f FORMAT if it is not to be \
        detected",
    ),
    of(&[], &["--object"], "encrypted images and other objects of QEMU are not known here; use qemu-img"),
];

/// Commands of qemu-img.
const COMMANDS: [(&str, &str); 2] = [
    (
        "commit",
        "serve the image, and use `vshunt commit DISK`; or copy it with its backing files: vshunt image convert",
    ),
    ("bench", "vshunt-bench measures a disk that is served"),
];

const fn of(commands: &'static [&'static str], names: &'static [&'static str], why: &'static str) -> Absent {
    Absent { commands, names, why }
}

/// Returns why `vshunt image COMMAND` does not have an option of qemu-img, and what to do.
pub(crate) fn option(command: &str, name: &str) -> Option<&'static str> {
    let is_it = |absent: &&Absent| {
        absent.names.contains(&name) && (absent.commands.is_empty() || absent.commands.contains(&command))
    };
    ABSENT.iter().find(is_it).map(|absent| absent.why)
}

/// Returns what to do in place of a command of qemu-img.
pub(crate) fn command(name: &str) -> Option<&'static str> {
    COMMANDS.iter().find(|(command, _)| *command == name).map(|(_, why)| *why)
}
