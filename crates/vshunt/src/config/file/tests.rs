//! What a configuration file says, and what is said about a wrong one.

use std::path::Path;

use vshunt_types::spec::{DiskSpec, ExportSpec, Format, NetSpec, Workers};

use super::*;
use crate::config::{check, told};

const WHOLE: &str = r#"
control = "/run/c"
control-group = 1234
control-mode = "0660"
metrics = "127.0.0.1:9150"
pidfile = "/run/p"
poll-us = 7
log-format = "json"
sandbox = "on"
sandbox-workers = true
allow-path = ["/images"]
[first-worker]
cpu = "0"
[[disk]]
name = "d0"
format = "ram"
size = "1.5G"
[[disk]]
name = "d1"
file = "/a"
readonly = true
[[net]]
type = "tap"
name = "n0"
ifname = "vs0"
queues = 2
[[worker]]
cpu = "2-3"
nice = -5
[[worker]]
cpu = [4]
name = "fast"
[[export]]
type = "vhost-user-blk"
name = "vm0"
disk = "d0"
socket = "/s"
workers = "per-queue"
[[export]]
type = "vhost-user-blk"
name = "vm1"
disk = "d0"
socket = "/t"
workers = 3
block-size = 4096
mode = "0660"
[[export]]
type = "vhost-user-net"
name = "c0"
net = "n0"
socket = "/n"
mac = "52:54:00:12:34:56"
[[attach]]
queues = "vm0:0-1"
worker = "fast"
[[attach]]
queues = "c0"
worker = 0
"#;

fn read(text: &str) -> Result<Setup, Vec<String>> {
    let (setup, wrong) = parse(Path::new("f.toml"), text);
    match wrong.lines() {
        wrong if wrong.is_empty() => Ok(setup),
        wrong => Err(wrong),
    }
}

/// All that is wrong with a file.
fn wrong(text: &str) -> Vec<String> {
    read(text).unwrap_err()
}

#[test]
fn it_says_what_flags_say() {
    let setup = read(WHOLE).unwrap();
    assert_eq!(setup.control, Control::At("/run/c".into()));
    let access = SocketAccess { owner: None, group: Some("1234".into()), mode: Some(SocketMode::GROUP) };
    assert_eq!((setup.control_access, setup.log_format), (access, Some(LogFormat::Json)));
    assert_eq!(setup.metrics, Some("9150".parse().unwrap()));
    assert_eq!((setup.pidfile, setup.poll_us), (Some("/run/p".into()), Some(7)));
    let sandbox = SandboxArgs { mode: Some(Mode::On), workers: true, allow_paths: vec!["/images".into()] };
    assert_eq!(setup.sandbox, sandbox);
    let flag = |text| keyval::parse::<DiskSpec>(text).unwrap();
    assert_eq!(setup.disks, [flag("name=d0,format=ram,size=1.5G"), flag("name=d1,file=/a,readonly=on")]);
    let flag = |text| keyval::parse::<WorkerSpec>(text).unwrap();
    assert_eq!(setup.workers, [flag("cpu=2-3,nice=-5"), flag("cpu=4,name=fast")]);
    assert_eq!(setup.first_worker, Some(flag("cpu=0")));
    assert_eq!((setup.exports[0].workers, setup.exports[1].workers), (Workers::PerQueue, Workers::Count(3)));
    assert_eq!(setup.exports[1].mode, Some(SocketMode::GROUP));
    assert_eq!(setup.disks[0].format(), Format::Ram);
    assert_eq!(setup.nets, [keyval::parse::<NetSpec>("type=tap,name=n0,ifname=vs0,queues=2").unwrap()]);
    let nic = "type=vhost-user-net,name=c0,net=n0,socket=/n,mac=52:54:00:12:34:56";
    assert_eq!(setup.exports[2], keyval::parse::<ExportSpec>(nic).unwrap());
    let queues = |export: &str, indices| QueueNames { export: export.into(), indices };
    let attach = [
        AttachSpec { queues: queues("vm0", Some(0..=1)), worker: "fast".into() },
        AttachSpec { queues: queues("c0", None), worker: "0".into() },
    ];
    assert_eq!(setup.attach, attach);
}

#[test]
fn descriptors_and_users_are_numbers_or_words() {
    for (fd, owner) in [("7", "1000"), ("\"7:8\"", "\"kvm\"")] {
        let file =
            format!("[[net]]\ntype = \"tap\"\nname = \"n\"\nfd = {fd}\nowner = {owner}\npersist = true");
        let flag = format!("type=tap,name=n,fd={fd},owner={owner},persist=on").replace('"', "");
        assert_eq!(read(&file).unwrap().nets, [keyval::parse::<NetSpec>(&flag).unwrap()]);
    }
}

#[test]
fn names_are_those_of_flags_without_a_name() {
    let file = "[[disk]]\nfile = \"/images/a b.img\"\n[[export]]\ntype = \"vhost-user-blk\"\n\
                disk = \"ab\"\nsocket = \"/s\"";
    let setup = read(file).unwrap();
    assert_eq!((setup.disks[0].name.as_str(), setup.exports[0].name.as_str()), ("ab", "ab"));
}

#[test]
fn what_is_wrong_has_its_place_and_its_name() {
    let cases = [
        (
            "[[disk]]\nname = \"d\"\nfil = 1",
            "3:1: disk d: unknown key `fil` (did you mean `file`?); the keys are ",
        ),
        ("[[disk]]\nformat = \"ram\"", "1:1: disk number 1: key `name` is missing"),
        ("[[disk]]\nname = \"d\"\n  size = \"1X\"", "3:10: disk d: key `size`: `1X` is not a size"),
        ("[[disk]]\nname = \"d\"\nfile = \"~/x\"", "3:8: disk d: key `file`: `~/` is not expanded in a file"),
        (
            "[[disk]]\nname = \"d\"\nreadonly = \"on\"",
            "3:12: disk d: key `readonly`: invalid type: string \"on\"",
        ),
        ("[[worker]]\ncpu = \"x\"", "2:7: worker number 1: key `cpu`: `x`"),
        ("[[worker]]\nnice = 99", "1:1: nice 99 is out of range"),
        ("[[export]]\nname = \"e\"", "1:1: export e: key `type` is missing"),
        (
            "[[export]]\nname = \"e\"\nworkers = \"x\"",
            "3:11: export e: key `workers`: wants default, per-queue",
        ),
        (
            "[[export]]\ntype = \"fuse\"\nname = \"e\"\ndisk = \"d\"\nqueues = 0",
            "5:1: export e: queues=0 is out of range",
        ),
        (
            "[[export]]\ntype = \"fuse\"\nname = \"e\"\nsokcet = \"s\"",
            "4:1: export e: unknown key `sokcet`; the keys are ",
        ),
        (
            "[[export]]\ntype = \"fuse\"\nname = \"e\"\nmode = \"7\"",
            "4:8: export e: key `mode`: `7` is no mode",
        ),
        ("[[net]]\nname = \"n\"\nifname = \"a\"", "1:1: net n: key `type` is missing"),
        (
            "[[net]]\ntype = \"tap\"\nname = \"n\"\nifname = \"a b\"",
            "1:1: network n: no interface can be called",
        ),
        ("[[net]]\ntype = \"tap\"\nname = \"n\"", "1:1: network n: give ifname=NAME"),
        (
            "[[net]]\ntype = \"tap\"\nname = \"n\"\nfd = true",
            "4:6: net n: key `fd`: invalid type: boolean `true`",
        ),
        (
            "[[attach]]\nqueues = \"a:3-2\"\nworker = 0",
            "2:10: attach number 1: key `queues`: `a:3-2` names no",
        ),
        ("[[attach]]\nqueues = \"a:3\"", "1:1: attach number 1: key `worker` is missing"),
        ("[first-worker]\nnise = 1", "2:1: first-worker: unknown key `nise` (did you mean `nice`?)"),
        ("[disk]\nname = \"d\"", "1:1: there can be several of this section; write its name in two brackets"),
        ("metrics = \":9150\"", "names no address; write 127.0.0.1:9150"),
        ("metrics = 9150", "1:11: invalid type: integer `9150`, expected a string"),
        ("\ncontrol = true", "2:11: control: give the path"),
        (
            "control-mode = 660",
            "1:16: invalid type: integer `660`, expected a mode in octal digits as a string",
        ),
        ("sandbox = \"x\"", "1:11: unknown variant `x`"),
        ("poll-us = 5\ndisks = 1", "2:1: unknown key `disks` (did you mean `disk`?); the keys are control, "),
        ("[[disk", "f.toml:1:"),
        ("a = é", "f.toml:1:"),
    ];
    for (text, want) in cases {
        let why = wrong(text);
        assert_eq!(why.len(), 1, "{text}: {why:?}");
        let starts = want.starts_with(|c: char| c.is_ascii_digit());
        let found =
            if starts { why[0].starts_with(&format!("f.toml:{want}")) } else { why[0].contains(want) };
        assert!(found, "{text}: {why:?}\nwanted {want}");
    }
}

#[test]
fn all_sections_are_read_before_it_ends() {
    let why = wrong("[[disk]]\nfil = 1\n[[disk]]\nname = \"d\"\nx = 1\n[[worker]]\nnice = \"y\"\n");
    let places: Vec<_> = why.iter().map(|why| why.split(": ").next().unwrap()).collect();
    assert_eq!(places, ["f.toml:2:1", "f.toml:5:1", "f.toml:7:8"]);
}

#[test]
fn all_errors_of_a_section_and_of_the_file_are_told_at_once() {
    let text = "disks = 1\npoll-us = \"x\"\n[[disk]]\nname = \"d\"\nsize = \"1X\"\nfil = 1\ncache = \"no\"\n\
                [net]\n[[export]]\nname = \"e\"\ndisk = \"d\"\nqueues = \"y\"\n";
    let why = wrong(text);
    let places: Vec<_> = why.iter().map(|why| why.split(": ").next().unwrap()).collect();
    let want = ["1:1", "2:11", "5:8", "6:1", "7:9", "8:1", "12:10"].map(|place| format!("f.toml:{place}"));
    assert_eq!(places, want, "{why:?}");
    // What others refer to is known, so they are checked.
    let (setup, wrong) =
        parse(Path::new("f"), "[[disk]]\nname = \"d\"\nsize = \"1X\"\n[[export]]\ndisk = \"d\"\nqueues = 0");
    let wrong = wrong.lines();
    assert_eq!((setup.disks.len(), setup.exports.len(), wrong.len()), (1, 1, 2), "{wrong:?}");
    assert!(setup.places.unfinished.contains(&0) && !setup.places.lacks_names);
    // Their number has a bound.
    let many: String = (0..1000).map(|n| format!("k{n} = 1\n")).collect();
    assert_eq!(wrong_of(&many), WRONG_MAX);
    assert_eq!(wrong_of(&format!("[[disk]]\n{many}")), WRONG_MAX);
}

fn wrong_of(text: &str) -> usize {
    wrong(text).len()
}

#[test]
fn columns_count_characters() {
    let text = "a = 'ß'; x";
    assert_eq!(Place::of(text, text.find('x').unwrap()), Place { line: 1, column: 10 });
    assert_eq!(Place::of("é\né", 4), Place { line: 2, column: 1 });
    assert_eq!(Place::of("", 99), Place { line: 1, column: 1 });
}

#[test]
fn places_are_found_in_one_pass() {
    let text = "[[disk]]\nx = [{}, {\n}]\n\u{e9}[[disk]]\n[[disk]]";
    let at: Vec<usize> = (0..=text.len()).filter(|at| text.is_char_boundary(*at)).collect();
    let each: Vec<Place> = at.iter().map(|at| Place::of(text, *at)).collect();
    assert_eq!(Place::of_all(text, &at), each);
    let some: Vec<Place> = each.iter().copied().step_by(5).collect();
    assert_eq!(Place::of_all(text, &at.into_iter().step_by(5).collect::<Vec<_>>()), some);
}

#[test]
fn a_large_file_is_read_in_linear_time_and_its_errors_have_a_bound() {
    const COUNT: usize = 100_000;
    let mut text = String::new();
    for n in 0..COUNT {
        text += &format!("[[disk]]\nname = \"d{n}\"\nformat = \"null\"\nsize = 512\n");
        text += &format!("[[export]]\ntype = \"fuse\"\ndisk = \"e{n}\"\nmountpoint = \"/m/{n}\"\n");
        text += &format!("[[attach]]\nqueues = \"f{n}\"\nworker = 0\n");
    }
    let all = problems(&text);
    assert_eq!(all.len(), told::MESSAGES_MAX + 1);
    assert!(all[0].starts_with("f.toml:5:1: export e0 is of disk e0, which is not there"), "{}", all[0]);
    assert_eq!(all.last().unwrap(), &format!("and {} more errors", 2 * COUNT - 100));
    let long = format!("[[disk]]\n{} = 1\n", "k".repeat(10 << 20));
    assert_eq!(wrong_of(&long), 1);
    let sizes = wrong(&"[[disk]]\nname = \"d\"\nsize = \"1X\"\n".repeat(COUNT));
    assert_eq!((sizes.len(), sizes[100].as_str()), (101, "and 99900 more errors"));
    let (keys, lines) =
        ((0..COUNT).map(|n| format!("k{n} = 1\n")).collect::<String>(), "= 1\n".repeat(COUNT));
    assert_eq!((wrong_of(&keys), wrong_of(&lines)), (WRONG_MAX, WRONG_MAX));
}

/// All that is wrong with a file and its parts together.
fn problems(text: &str) -> Vec<String> {
    let (setup, mut wrong) = parse(Path::new("f.toml"), text);
    check::problems(&setup, &mut wrong);
    wrong.lines()
}

#[test]
fn a_path_with_a_zero_byte_is_refused() {
    for text in [
        "pidfile = \"/a\\u0000b\"",
        "control = \"/a\\u0000b\"",
        "metrics = \"unix:/a\\u0000b\"",
        "allow-path = [\"/a\\u0000b\"]",
        "[[disk]]\nname = \"d\"\nfile = \"/a\\u0000b\"",
        "[[disk]]\nname = \"d\"\nfile = \"/a\"\n[[export]]\ntype = \"vhost-user-blk\"\ndisk = \"d\"\nsocket = \"/a\\u0000b\"",
        "[[disk]]\nname = \"d\"\nfile = \"/a\"\n[[export]]\ntype = \"fuse\"\ndisk = \"d\"\nmountpoint = \"/a\\u0000b\"",
        "[[net]]\ntype = \"tap\"\nifname = \"t\"\nnetns = \"/a\\u0000b\"",
    ] {
        let wrong = problems(text);
        assert!(wrong.len() == 1 && wrong[0].contains("NUL byte"), "{text}: {wrong:?}");
    }
}

#[test]
fn limits_are_a_table_of_an_export() {
    let text = |limits: &str| {
        format!(
            "[[disk]]\nname = \"d0\"\nformat = \"ram\"\nsize = \"1M\"\n[[export]]\nname = \"vm0\"\ndisk = \"d0\"\nsocket = \"/s\"\n{limits}\n"
        )
    };
    let all = [
        "limits = { iops = 5000, bps = \"200M\", burst-iops = \"20000:10s\", group = \"g\" }",
        "limits.iops = 5000\nlimits.bps = 209715200\nlimits.burst-iops = \"20000:10s\"\nlimits.group = \"g\"",
        "[export.limits]\niops = 5000\nbps = \"200M\"\nburst-iops = \"20000:10s\"\ngroup = \"g\"",
    ];
    for limits in all {
        let (setup, wrong) = parse(Path::new("f"), &text(limits));
        assert_eq!(wrong.lines(), [""; 0]);
        let limits = setup.exports[0].limits.clone().unwrap();
        assert_eq!(
            (limits.iops, limits.bps, limits.group.as_deref()),
            (Some(5000), Some(200 << 20), Some("g"))
        );
        assert_eq!(limits.burst_iops.map(|burst| (burst.rate, burst.seconds)), Some((20_000, 10)));
    }
    for (limits, said) in [
        ("limits = { iop = 5 }", "did you mean `iops`?"),
        ("limits = { iops = -5 }", "key `iops`"),
        ("limits = { iops = 0 }", "out of range"),
        ("limits = 5", "keys of its own"),
    ] {
        let (_, wrong) = parse(Path::new("f"), &text(limits));
        let wrong = wrong.lines();
        assert!(wrong.iter().any(|line| line.contains(said)), "{limits}: {wrong:?}");
    }
}
