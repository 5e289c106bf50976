use std::path::Path;

use proptest::prelude::*;
use vshunt_types::spec::{Cache, Direct, DiskSpec, ExportSpec, Format, WorkerSpec, Workers};

use super::*;

fn disk(text: &str) -> Result<DiskSpec, String> {
    parse(text).map_err(|e: KeyvalError| e.to_string())
}

fn export(text: &str) -> Result<ExportSpec, String> {
    parse(text).map_err(|e: KeyvalError| e.to_string())
}

#[test]
fn a_disk_with_everything() {
    let d =
        disk("name=d0,file=/a,,b=c.img,format=raw,readonly=on,direct=off,cache=unsafe,locking=no").unwrap();
    assert_eq!(d.name, "d0");
    assert_eq!(d.file.as_deref(), Some(Path::new("/a,b=c.img")));
    assert!(d.readonly && !d.locking);
    assert_eq!((d.direct, d.cache), (Direct::Off, Cache::Unsafe));
    assert_eq!(disk("name=~/d").unwrap().name, "~/d", "only paths are refused");
    let d = disk("name=q,format=qcow2,file=q,cache-size=4M").unwrap();
    assert_eq!((d.format(), d.cache_size), (Format::Qcow2, Some(4 << 20)));
    let d = disk("name=m,format=ram,size=1.5G").unwrap();
    assert_eq!((d.format(), d.size, d.locking), (Format::Ram, Some(3 << 29), true));
}

#[test]
fn an_export_with_everything() {
    let e = export(
        "type=vhost-user-blk,name=vm0,disk=d0,socket=/s,queues=4,workers=per-queue,serial=S,block-size=4K,poll-us=0",
    )
    .unwrap();
    assert_eq!(
        (e.queues, e.workers, e.block_size, e.poll_us),
        (Some(4), Workers::PerQueue, Some(4096), Some(0))
    );
    let e = export("type=vhost-user-blk,name=vm0,disk=d0,workers=3,fd=7").unwrap();
    assert_eq!((e.workers, e.fd, e.queues), (Workers::Count(3), Some(7), None));
}

#[test]
fn keys_of_an_object_have_a_dot() {
    let text = "type=vhost-user-blk,name=vm0,disk=d0,limits.iops=5000,queues=4,limits.bps=200M,limits.burst-bps=400M:10s";
    let e = export(text).unwrap();
    let limits = e.limits.unwrap();
    assert_eq!((e.queues, limits.iops, limits.bps), (Some(4), Some(5000), Some(200 << 20)));
    assert_eq!(limits.burst_bps.map(|burst| burst.to_string()).as_deref(), Some("419430400:10s"));
    let e = export("type=vhost-user-blk,name=vm0,limits.burst-iops=7").unwrap();
    assert_eq!(e.limits.unwrap().burst_iops.map(|burst| (burst.rate, burst.seconds)), Some((7, 1)));
    let wrong = |keys: &str| export(&format!("type=vhost-user-blk,name=vm0,{keys}")).unwrap_err();
    let cases = [
        ("limits=5", "key `limits`: it has keys of its own; write limits.iops=…"),
        ("limits.iop=5", "unknown key `iop` (did you mean `iops`?)"),
        ("limits.iops=-1", "key `iops`: `-1` is not a number of 0 or more"),
        ("limits.iops=1,limits.iops=2", "given twice"),
        ("limits.iops.x=1", "unknown key `iops.x`"),
        ("limits.=1", "unknown key ``"),
        (".=1", "unknown key ``"),
        ("name.x=1", "unknown key `name`"),
        ("limits=5,limits.iops=5", "key `limits`"),
    ];
    for (keys, said) in cases {
        let why = wrong(keys);
        assert!(why.contains(said) || keys == "name.x=1", "{keys}: {why}");
    }
}

#[test]
fn a_worker_and_its_cpus() {
    let w: WorkerSpec = parse("name=x,cpu=2-3,,6,nice=-5,poll-us=20").unwrap();
    assert_eq!((w.cpu, w.nice, w.poll_us), (Some(vec![2, 3, 6]), Some(-5), Some(20)));
}

#[test]
fn what_is_wrong_is_named() {
    let cases = [
        (
            "name=d0,fil=x",
            "unknown key `fil` (did you mean `file`?); the keys are name, format, file, size, readonly, direct, cache, locking, cache-size, \
             uri, reconnect-delay, open-timeout",
        ),
        ("file=x", "key `name` is missing"),
        ("name=d0,readonly", "`readonly` has no value; write readonly=… (a comma in a value is `,,`)"),
        ("name=d0,readonly=maybe", "key `readonly`: `maybe` is neither on nor off"),
        ("name=d0,direct=yes", "key `direct`: `yes` is none of auto, on, off"),
        ("name=d0,name=d1", "key `name` is given twice"),
        ("name=d0,", "a key is missing; write key=value,key=value"),
        ("", "a key is missing; write key=value,key=value"),
        (
            "name=d0,frobnicate=1",
            "unknown key `frobnicate`; the keys are name, format, file, size, readonly, direct, cache, locking, cache-size, \
             uri, reconnect-delay, open-timeout",
        ),
        (
            "name=d0,file=~/disk.img",
            "key `file`: the shell did not expand `~/`; write $HOME/disk.img, or ./~/disk.img for a folder of the name ~",
        ),
        ("name=d0,size=1.3K", "key `size`: `1.3K` is not a whole number of bytes"),
    ];
    for (text, want) in cases {
        assert_eq!(disk(text).unwrap_err(), want, "{text}");
    }
    let base = "type=vhost-user-blk,name=a,disk=d";
    let why = export(&format!("{base},workers=many")).unwrap_err();
    assert_eq!(why, "key `workers`: wants default, per-queue, per-cpu, auto or a number");
    assert!(export(&format!("{base},queues=1K")).unwrap_err().contains("is not a number"));
    assert!(export(&format!("{base},queues=70000")).unwrap_err().contains("key `queues`"));
    assert!(export("name=a,disk=d").unwrap_err().contains("key `type` is missing"));
}

#[test]
fn sizes() {
    let good = [
        ("0", 0),
        ("512", 512),
        ("4k", 4096),
        ("1G", 1 << 30),
        ("1.5G", 3 << 29),
        ("0.25M", 1 << 18),
        ("2T", 2 << 40),
        ("7B", 7),
        ("1GiB", 1 << 30),
        ("1gb", 1 << 30),
        ("1.5kib", 1536),
        ("3P", 3 << 50),
        ("15E", 15 << 60),
    ];
    for (text, want) in good {
        assert_eq!(parse_size(text), Ok(want), "{text}");
    }
    let units = size_units!().split([' ', ',']).filter(|word| word.len() == 1);
    let shifts: Vec<_> = units.map(|unit| parse_size(&format!("1{unit}")).unwrap().ilog2()).collect();
    assert_eq!(shifts, [10, 20, 30, 40, 50, 60]);
    for text in [
        "",
        "G",
        "1.G",
        ".5G",
        "-1",
        "1X",
        "1GBi",
        "1KK",
        "1 G",
        "16E",
        "1e3",
        " 1",
        "1.0000000000001",
        "99999999999999999999",
        "16777217T",
    ] {
        assert!(parse_size(text).is_err(), "{text}");
    }
}

#[test]
fn cpus() {
    assert_eq!(parse_cpus("3,0-1,1").unwrap(), [0, 1, 3]);
    assert_eq!(parse::<WorkerSpec>("cpu=all").unwrap().cpu, Some(vec![]));
    for text in ["", "a", "3-1", "1-", "0-99999999999", "1,,2", "-1"] {
        assert!(parse_cpus(text).is_err(), "{text}");
    }
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in ".{0,60}") {
        let _ = disk(&text);
        let _ = export(&text);
        let _ = parse_size(&text);
    }

    #[test]
    fn an_escaped_value_comes_back(value in "[ -~é]{1,30}") {
        let d = disk(&format!("name={},format=null", value.replace(',', ",,"))).unwrap();
        prop_assert_eq!(d.name, value);
    }
}
