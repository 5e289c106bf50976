use std::sync::atomic::{AtomicU64, Ordering};

use super::super::journal_name::{AT_PATH, handle_of};
use super::*;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// A folder of journals, and one of images.
struct Places {
    journals: tempfile::TempDir,
    images: tempfile::TempDir,
}

impl Places {
    fn new() -> Self {
        // On a file system with file handles. /dev/shm and most others have them.
        let folder = || tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        Self { journals: folder(), images: folder() }
    }

    /// Makes an image and its journal. Returns the paths of both. `handle`: the journal has the
    /// file handle of the image.
    fn add(&self, image: &str, handle: bool) -> (PathBuf, PathBuf) {
        let path = self.images.path().join(image);
        let file = File::create(&path).unwrap();
        let meta = file.metadata().unwrap();
        let journal = self.journals.path().join(format!("vshunt-map-{:x}-{:x}", meta.dev(), meta.ino()));
        let mut name = Name::of(&file, &path).unwrap();
        if !handle {
            name.handle.clear();
        }
        std::fs::write(&journal, [vec![7; 4096], name.encode()].concat()).unwrap();
        (path, journal)
    }

    fn sweep(&self, now: SystemTime) {
        sweep_in(self.journals.path(), now);
    }
}

#[test]
fn a_name_is_read_as_it_was_written() {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    for handle in [vec![], vec![3; 20]] {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = Name { missed_s: number, device: number << 40, handle, path: "/a/b\u{fc}".into() };
        assert_eq!(Name::decode(&name.encode()), Some(name));
    }
    assert_eq!(Name::decode(&[0; NAME_BYTES as usize]), None);
    let mut bytes = Name { missed_s: 0, device: 0, handle: vec![], path: "/a".into() }.encode();
    bytes[AT_PATH..AT_PATH + 8].fill(0xff);
    assert_eq!(Name::decode(&bytes), None, "longer than there is room");
    assert_eq!(Name::decode(&bytes[..100]), None);
}

#[test]
fn the_journal_of_a_missing_image_is_removed() {
    let (places, now) = (Places::new(), SystemTime::now());
    let ((image, journal), (kept, kepts)) = (places.add("gone", true), places.add("kept", true));
    places.sweep(now + 30 * DAY);
    assert!(journal.exists() && kepts.exists(), "its image is there");
    // A renamed image is the same image.
    let moved = places.images.path().join("moved");
    std::fs::rename(&kept, &moved).unwrap();
    std::fs::remove_file(&image).unwrap();
    let folder = File::open(places.images.path()).unwrap();
    let can = exists(&handle_of(&File::open(&moved).unwrap()).unwrap_or_default(), &folder);
    if can != Some(true) {
        eprintln!(
            "skip the_journal_of_a_missing_image_is_removed: no file handles here, or not for this user"
        );
        return;
    }
    places.sweep(now);
    assert!(journal.exists(), "its image is gone since today");
    places.sweep(now + GONE_FOR);
    assert!(!journal.exists(), "its image is gone since yesterday");
    places.sweep(now + 30 * DAY);
    assert!(kepts.exists(), "its image was moved");
}

#[test]
fn without_a_handle_an_image_has_to_be_missing_for_long() {
    let (places, now) = (Places::new(), SystemTime::now());
    let (image, journal) = places.add("image", false);
    let away = places.images.path().join("away");
    std::fs::rename(&image, &away).unwrap();
    places.sweep(now);
    places.sweep(now + 6 * DAY);
    assert!(journal.exists(), "it is missing since six days");
    std::fs::rename(&away, &image).unwrap();
    places.sweep(now + 8 * DAY);
    assert!(journal.exists(), "it is there again");
    std::fs::remove_file(&image).unwrap();
    // Another file has the path of the image.
    std::fs::write(&image, "").unwrap();
    std::fs::remove_file(&image).unwrap();
    places.sweep(now + 9 * DAY);
    assert!(journal.exists(), "it is missing since today");
    places.sweep(now + 17 * DAY);
    assert!(!journal.exists(), "it is missing since eight days");
}

#[test]
fn a_file_whose_process_was_killed_is_removed() {
    let (places, now) = (Places::new(), SystemTime::now());
    let half = |name: &str| places.journals.path().join(format!("vshunt-map-1-2.{name}"));
    let (by_process, by_number, used) = (half("4711"), half("00112233445566778899aabbccddeeff"), half("5"));
    for path in [&by_process, &by_number, &used] {
        std::fs::write(path, [7; 100]).unwrap();
    }
    places.sweep(now);
    let minute = Duration::from_secs(60);
    places.sweep(now + 59 * minute);
    assert!(by_process.exists() && by_number.exists() && used.exists(), "they may be being made");
    let maker = File::open(&used).unwrap();
    rustix::fs::flock(&maker, EXCLUSIVE).unwrap();
    places.sweep(now + 61 * minute);
    assert!(!by_process.exists() && !by_number.exists(), "their makers are gone");
    assert!(used.exists(), "its maker has it");
}

#[test]
fn a_journal_is_kept_where_it_cannot_be_told() {
    let (places, now) = (Places::new(), SystemTime::now());
    // A live process uses it.
    let (image, used) = places.add("used", true);
    let user = File::open(&used).unwrap();
    rustix::fs::flock(&user, EXCLUSIVE).unwrap();
    std::fs::remove_file(&image).unwrap();
    // On a file system that is not mounted: its folder is missing, or is on another device.
    let (_, unmounted) = places.add("unmounted", true);
    let (_, elsewhere) = places.add("elsewhere", true);
    for (journal, path, device) in [(&unmounted, "/none-such/image", 1), (&elsewhere, "/proc/image", 1)] {
        let name = Name { missed_s: 1, device, handle: vec![], path: path.into() };
        std::fs::write(journal, name.encode()).unwrap();
    }
    // Files of an earlier version, of another user, and of another program.
    let older = places.journals.path().join("vshunt-map-1-2");
    std::fs::write(&older, vec![0; 16384]).unwrap();
    let (image, shared) = places.add("shared", true);
    std::fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    std::fs::remove_file(image).unwrap();
    let other = places.journals.path().join("vshunt-map-1-2.old");
    std::fs::write(&other, vec![0; 16384]).unwrap();
    places.sweep(now + 30 * DAY);
    places.sweep(now + 60 * DAY);
    for journal in [&used, &unmounted, &elsewhere, &older, &shared, &other] {
        assert!(journal.exists(), "{} is removed", journal.display());
    }
}

#[test]
fn an_image_on_a_fuse_mount_is_not_looked_for() {
    let mountinfo = b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
        30 22 0:40 / /srv/far rw,nosuid shared:2 master:1 - fuse.sshfs host: rw\n\
        31 22 0:41 / /srv/disk rw - fuse.vshunt vshunt:d0 rw\n\
        32 22 0:42 / /run/ctl rw - fusectl none rw\n\
        33 30 8:2 / /srv/far/near rw - xfs /dev/sdb rw\n\
        34 22 0:43 / /mnt/a\\040b rw - virtiofs tag rw\n";
    for (path, waits) in [
        ("/a", false),
        ("/srv/disk", false),
        ("/srv/disk/below", true),
        ("/srv/far/a", true),
        ("/srv/far", false),
        ("/srv/farther/a", false),
        ("/srv/far/near/a", true),
        ("/run/ctl/a", false),
        ("/mnt/a b/c", true),
        ("/mnt/b/c", false),
        ("/", true),
    ] {
        assert_eq!(may_be_on_fuse(mountinfo, Path::new(path)), waits, "{path}");
    }
    assert!(may_be_on_fuse(b"1 1 0:1 / / rw - fuseblk /dev/sda rw\n", Path::new("/a")));
}

/// A path that now contains a symbolic link may lead to a mount that was not checked.
#[test]
fn a_symbolic_link_is_not_followed() {
    let (places, now) = (Places::new(), SystemTime::now());
    let (image, journal) = places.add("d", false);
    let moved = places.images.path().join("moved");
    std::fs::rename(&image, &moved).unwrap();
    std::os::unix::fs::symlink(&moved, &image).unwrap();
    assert!(find(&image).is_err() && find(&moved).is_ok());
    places.sweep(now);
    places.sweep(now + 30 * DAY);
    assert!(journal.exists(), "it cannot be told");
}
