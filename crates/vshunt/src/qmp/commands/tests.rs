use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use serde_json::json;
use vshunt_daemon::{Daemon, Options};
use vshunt_types::spec::DiskSpec;

use super::*;
use crate::qmp::context::Stop;
use crate::qmp::message::Class;

pub(crate) fn context() -> (Context, Receiver<Stop>) {
    let (stop, stopped) = channel();
    let daemon = Daemon::new(Options { poll_us: 0 }).unwrap();
    (Context { daemon, stop, fdsets: Arc::default(), startup: Arc::default() }, stopped)
}

fn call(context: &Context, name: &str, arguments: Value) -> Answer {
    let Value::Object(members) = arguments else { panic!("arguments are an object") };
    run(context, name, members, None)
}

fn refused(context: &Context, name: &str, arguments: Value) -> String {
    let e = call(context, name, arguments).unwrap_err();
    assert_eq!(e.class, Class::GenericError, "{}", e.desc);
    e.desc
}

fn disk(context: &Context, name: &str) -> DiskSpec {
    context.daemon.disks().into_iter().map(|d| d.spec).find(|d| d.name == name).unwrap()
}

#[test]
fn the_table_is_sorted_and_whole() {
    assert!(COMMANDS.is_sorted_by_key(|c| c.name));
    let (context, _) = context();
    let names = call(&context, "query-commands", json!({})).unwrap();
    assert_eq!(names.as_array().unwrap().len(), COMMANDS.len());
    assert!(names.as_array().unwrap().contains(&json!({ "name": "queue-attach" })));
}

#[test]
fn classes_of_failures() {
    let (context, _) = context();
    let class = |name, arguments| call(&context, name, arguments).unwrap_err().class;
    assert_eq!(class("no-such", json!({})), Class::CommandNotFound);
    assert_eq!(class("qmp_capabilities", json!({})), Class::CommandNotFound);
    assert_eq!(class("disk-remove", json!({ "name": "x" })), Class::DeviceNotFound);
    assert_eq!(class("worker-free", json!({ "id": 77 })), Class::DeviceNotFound);
    assert_eq!(class("worker-free", json!({ "id": "0" })), Class::GenericError);
    let why = refused(&context, "query-disks", json!({ "x": 1 }));
    assert!(why.starts_with("arguments of 'query-disks': unknown field `x`"), "{why}");
    let why = refused(&context, "worker-set", json!({ "nice": 1 }));
    assert_eq!(why, "arguments of 'worker-set': missing field `id`");
}

#[test]
fn workers_come_change_and_go() {
    let (context, _) = context();
    let made = call(&context, "worker-new", json!({ "name": "x", "poll-us": 5 })).unwrap();
    let id = made["id"].as_u64().unwrap();
    call(&context, "worker-set", json!({ "id": id, "poll-us": 9 })).unwrap();
    let list = call(&context, "query-workers", json!({})).unwrap();
    let worker = list.as_array().unwrap().iter().find(|w| w["id"] == id).unwrap();
    assert_eq!((&worker["name"], &worker["poll-us"]), (&json!("x"), &json!(9)));
    call(&context, "worker-free", json!({ "id": id })).unwrap();
    assert_eq!(call(&context, "worker-free", json!({ "id": id })).unwrap_err().class, Class::DeviceNotFound);
}

#[test]
fn balance_is_set_for_the_daemon_and_for_exports() {
    let dir = tempfile::tempdir().unwrap();
    let (context, _) = context();
    call(&context, "disk-add", json!({ "name": "d0", "format": "ram", "size": 1 << 20 })).unwrap();
    let export = json!({ "type": "vhost-user-blk", "name": "vm0", "disk": "d0", "socket": dir.path().join("s"), "queues": 2 });
    call(&context, "export-add", export).unwrap();
    let set = |arguments| call(&context, "balance-set", arguments);
    let found = || {
        let list = call(&context, "query-exports", json!({})).unwrap();
        (
            list[0]["balance"].clone(),
            list[0]["balancing"]["mode"].clone(),
            list[0]["balancing"]["attached"].clone(),
        )
    };
    assert_eq!(found(), (Value::Null, Value::Null, Value::Null));
    set(json!({ "mode": "dry-run" })).unwrap();
    assert_eq!(call(&context, "query-balance", json!({})).unwrap(), json!({ "mode": "dry-run" }));
    assert_eq!(found(), (Value::Null, json!("dry-run"), Value::Null));
    call(&context, "queue-attach", json!({ "export": "vm0", "index": 1, "worker": 0 })).unwrap();
    assert_eq!(found().2, json!([1]));
    refused(&context, "balance-set", json!({}));
    set(json!({ "export": "no", "mode": "auto" })).unwrap_err();
    set(json!({ "export": "vm0", "mode": "auto" })).unwrap();
    assert_eq!(found(), (json!("auto"), json!("auto"), Value::Null));
    let config = call(&context, "query-config", json!({})).unwrap()["toml"].as_str().unwrap().to_owned();
    assert_eq!(config.matches("balance = ").count(), 2, "{config}");
    set(json!({ "mode": "off" })).unwrap();
    assert_eq!(found().1, json!("auto"));
    set(json!({ "export": "vm0" })).unwrap();
    assert_eq!(found(), (Value::Null, Value::Null, Value::Null));
    context.daemon.shutdown();
}

#[test]
fn native_commands_for_disks_and_exports() {
    let dir = tempfile::tempdir().unwrap();
    let (context, _) = context();
    call(&context, "disk-add", json!({ "name": "d0", "format": "ram", "size": 1 << 20 })).unwrap();
    let socket = dir.path().join("s");
    let export =
        json!({ "type": "vhost-user-blk", "name": "vm0", "disk": "d0", "socket": socket, "queues": 2 });
    call(&context, "export-add", export).unwrap();
    assert!(refused(&context, "disk-remove", json!({ "name": "d0" })).contains("d0"));
    let list = call(&context, "query-exports", json!({})).unwrap();
    assert_eq!((&list[0]["name"], &list[0]["queues"]), (&json!("vm0"), &json!(2)));
    assert_eq!(call(&context, "query-queues", json!({})).unwrap().as_array().unwrap().len(), 2);
    let worker = call(&context, "worker-new", json!({})).unwrap()["id"].clone();
    let attach = json!({ "export": "vm0", "index": 1, "worker": worker, "timeout-ms": 1000 });
    call(&context, "queue-attach", attach).unwrap();
    assert_eq!(call(&context, "query-queues", json!({})).unwrap()[1]["worker"], worker);
    call(&context, "queue-attach", json!({ "export": "vm0", "index": 0, "last": 1, "worker": worker }))
        .unwrap();
    let bad = json!({ "export": "vm0", "index": 1, "last": 0, "worker": worker });
    assert!(refused(&context, "queue-attach", bad).contains("last"));
    let of = |arguments| call(&context, "query-queues", arguments).unwrap().as_array().unwrap().len();
    assert_eq!(of(json!({ "started-only": true })), 2);
    assert_eq!(of(json!({ "export": "no" })), 0);
    let many = json!({ "type": "vhost-user-blk", "name": "vm1", "disk": "d0", "readonly": true, "socket": dir.path().join("t") });
    call(&context, "export-add", many).unwrap();
    let numbers = [json!({}), json!({ "started-only": true }), json!({ "export": "vm1" })].map(of);
    assert_eq!(numbers, [258, 2, 256]);
    let list = call(&context, "query-exports", json!({ "started-only": true })).unwrap();
    let left_out =
        |at: usize| (list[at]["queue-list"].as_array().unwrap().len(), &list[at]["queues-left-out"]);
    assert_eq!([left_out(0), left_out(1)], [(2, &Value::Null), (0, &json!(256))]);
    call(&context, "export-remove", json!({ "name": "vm1" })).unwrap();
    let long = json!({ "export": "vm0", "index": 1, "worker": 0, "timeout-ms": u64::MAX });
    assert!(refused(&context, "queue-attach", long).contains("timeout-ms"));
    let fd = json!({ "type": "vhost-user-blk", "name": "b", "disk": "d0", "fd": 0 });
    assert!(refused(&context, "export-add", fd).contains("file descriptor"));
    call(&context, "export-remove", json!({ "name": "vm0" })).unwrap();
    call(&context, "disk-remove", json!({ "name": "d0" })).unwrap();
}

#[test]
fn the_shapes_of_blockdev_add() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("d.img");
    std::fs::write(&image, vec![0; 8192]).unwrap();
    let (context, _) = context();
    let file = json!({ "driver": "file", "node-name": "f", "filename": image, "read-only": true, "aio": "io_uring" });
    call(&context, "blockdev-add", file).unwrap();
    assert!(disk(&context, "f").readonly);
    assert_eq!(disk(&context, "f").file.as_ref(), Some(&image));
    call(&context, "blockdev-del", json!({ "node-name": "f" })).unwrap();

    let nested =
        json!({ "driver": "file", "filename": image, "locking": "off", "cache": { "direct": false } });
    let raw = json!({
        "driver": "raw", "node-name": "r", "file": nested, "cache": { "direct": true, "no-flush": true }
    });
    call(&context, "blockdev-add", raw).unwrap();
    let r = disk(&context, "r");
    assert_eq!((r.direct, r.cache), (vshunt_types::spec::Direct::Off, vshunt_types::spec::Cache::Unsafe));
    assert!(!r.locking && !r.readonly);

    call(&context, "blockdev-add", json!({ "driver": "null-co", "node-name": "n" })).unwrap();
    assert_eq!(disk(&context, "n").size, Some(1 << 30));
    let nodes = call(&context, "query-named-block-nodes", json!({ "flat": true })).unwrap();
    let null = nodes.as_array().unwrap().iter().find(|n| n["node-name"] == "n").unwrap();
    assert_eq!((&null["drv"], &null["image"]["virtual-size"]), (&json!("null-co"), &json!(1 << 30)));
    call(&context, "block_resize", json!({ "node-name": "n", "size": 1 << 21 })).unwrap();
}

#[test]
fn what_blockdev_add_refuses() {
    let (context, _) = context();
    let cases = [
        (json!({ "driver": "file", "filename": "x" }), "'node-name' is missing"),
        (json!({ "driver": "file", "node-name": "a" }), "'filename' is missing"),
        (json!({ "driver": "qcow2", "node-name": "a" }), "'filename' is missing"),
        (json!({ "driver": "vmdk", "node-name": "a" }), "unknown variant `vmdk`"),
        (
            json!({ "driver": "file", "node-name": "a", "filename": "x", "cache-size": 1 }),
            "driver qcow2 only",
        ),
        (
            json!({ "driver": "qcow2", "node-name": "a", "file": { "driver": "null-co" } }),
            "must be the one node that names a file",
        ),
        (json!({ "driver": "raw", "node-name": "a", "file": "b" }), "nodes do not stack here"),
        (json!({ "driver": "nbd", "node-name": "a" }), "'server' is missing"),
        (
            json!({ "driver": "nbd", "node-name": "a", "server": { "type": "unix", "path": "/s" }, "filename": "x" }),
            "'filename'",
        ),
        (
            json!({ "driver": "nbd", "node-name": "a", "server": { "type": "fd", "str": "3" } }),
            "unknown variant `fd`",
        ),
        (json!({ "driver": "nbd", "node-name": "a", "tls-creds": "t" }), "nbds://"),
        (json!({ "driver": "file", "node-name": "a", "filename": "x", "export": "e" }), "driver nbd only"),
        (
            json!({ "driver": "qcow2", "node-name": "a", "file": {
                "driver": "nbd", "server": { "type": "unix", "path": "/nowhere/s" }, "export": "e"
            } }),
            "nbd+unix:///e?socket=/nowhere/s",
        ),
        (json!({ "driver": "file", "node-name": "a", "filename": "x", "discard": "ignore" }), "discards"),
        (
            json!({ "driver": "file", "node-name": "a", "filename": "x", "detect-zeroes": "on" }),
            "detect-zeroes",
        ),
        (json!({ "driver": "file", "node-name": "a", "filename": "x", "size": 512 }), "its own size"),
        (json!({ "driver": "null-co", "node-name": "a", "foo": 1 }), "unknown field `foo`"),
        (json!({ "driver": "raw", "node-name": "a", "filename": "x", "backing": null }), "driver qcow2 only"),
        (
            json!({ "driver": "qcow2", "node-name": "a", "filename": "x", "backing": "b" }),
            "do not stack here",
        ),
        (
            json!({ "driver": "qcow2", "node-name": "a", "file": { "driver": "file", "filename": "x", "backing": null } }),
            "not into its 'file'",
        ),
    ];
    for (arguments, want) in cases {
        let why = refused(&context, "blockdev-add", arguments);
        assert!(why.contains(want), "{why}");
    }
    assert!(context.daemon.disks().is_empty());
}

#[test]
fn the_shapes_of_block_export_add() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (context, _) = context();
    call(&context, "blockdev-add", json!({ "driver": "null-co", "node-name": "n" })).unwrap();
    let base = json!({
        "type": "vhost-user-blk", "id": "e", "node-name": "n", "addr": { "type": "unix", "path": socket }
    });
    let with = |name: &str, value: Value| {
        let mut arguments = base.clone();
        arguments[name] = value;
        arguments
    };
    for (name, value, want) in [
        ("addr", json!({ "type": "fd", "str": "3" }), "file descriptor"),
        ("addr", json!({ "type": "inet" }), "'addr'"),
        ("iothread", json!("io0"), "workers"),
        ("writethrough", json!(true), "belongs to the disk"),
        ("type", json!("nbd"), "use export-add with 'listen'"),
        ("type", json!("vduse-blk"), "unknown variant `vduse-blk`"),
    ] {
        let why = refused(&context, "block-export-add", with(name, value));
        assert!(why.contains(want), "{why}");
    }
    call(&context, "block-export-add", base.clone()).unwrap();
    let e = context.daemon.exports()[0].spec.clone();
    assert!(e.readonly, "QEMU's writable is false unless given");
    assert_eq!((e.queues, e.block_size), (Some(1), Some(512)));
    let want = json!([{ "id": "e", "type": "vhost-user-blk", "node-name": "n", "shutting-down": false }]);
    assert_eq!(call(&context, "query-block-exports", json!({})).unwrap(), want);
    call(&context, "block-export-del", json!({ "id": "e", "mode": "hard" })).unwrap();
    call(&context, "block-export-add", with("writable", json!(true))).unwrap();
    assert!(!context.daemon.exports()[0].spec.readonly);
}

#[test]
fn limits_are_read_by_the_names_they_are_set_by() {
    let dir = tempfile::tempdir().unwrap();
    let (context, _) = context();
    call(&context, "blockdev-add", json!({ "driver": "null-co", "node-name": "n" })).unwrap();
    let export = json!({
        "type": "vhost-user-blk", "id": "e", "node-name": "n",
        "addr": { "type": "unix", "path": dir.path().join("s") }
    });
    call(&context, "block-export-add", export).unwrap();
    let device = || call(&context, "query-block", json!({})).unwrap()[0].clone();
    let inserted = device()["inserted"].clone();
    assert_eq!((&device()["device"], &inserted["node-name"]), (&json!("e"), &json!("n")));
    assert_eq!((&inserted["drv"], &inserted["ro"]), (&json!("null-co"), &json!(true)));
    for absent in ["iops_max", "iops_max_length", "iops_size", "group"] {
        assert_eq!(inserted.get(absent), None);
    }
    let mut limits = json!({ "iops_size": 8192, "group": "g" });
    for (at, name) in ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"].into_iter().enumerate() {
        limits[name] = json!(1000 * (at + 1));
        limits[format!("{name}_max")] = json!(100_000 * (at + 1));
        limits[format!("{name}_max_length")] = json!(at + 1);
    }
    let mut set = limits.clone();
    set["id"] = json!("e");
    call(&context, "block_set_io_throttle", set).unwrap();
    let inserted = device()["inserted"].clone();
    for (name, value) in limits.as_object().unwrap() {
        assert_eq!(&inserted[name], value, "{name}");
    }
}

#[test]
fn a_mount_is_asked_for_as_of_qemu() {
    let (context, _) = context();
    call(&context, "blockdev-add", json!({ "driver": "null-co", "node-name": "n" })).unwrap();
    let base = json!({ "type": "fuse", "id": "f", "node-name": "n" });
    let with = |more: Value| {
        let mut arguments = base.clone();
        arguments.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
        arguments
    };
    for (more, want) in [
        (json!({}), "mountpoint"),
        (json!({ "mountpoint": "/", "addr": { "type": "unix", "path": "/s" } }), "'addr' belongs to"),
        (json!({ "mountpoint": "/nowhere/at/all", "growable": true }), "growable=on needs writable=on"),
        (json!({ "mountpoint": "/nowhere/at/all", "serial": "x" }), "serial is of type=vhost-user-blk"),
        (json!({ "mountpoint": "/", "writable": true, "allow-other": "auto" }), "folder"),
    ] {
        let why = refused(&context, "block-export-add", with(more));
        assert!(why.contains(want), "{why}");
    }
    assert!(context.daemon.exports().is_empty());
}

#[test]
fn quit_asks_the_daemon_to_end() {
    let (context, stopped) = context();
    call(&context, "quit", json!({})).unwrap();
    assert_eq!(stopped.try_recv(), Ok(Stop::Quit));
}

#[test]
fn addresses_of_networks() {
    let (context, _) = context();
    call(&context, "net-add", json!({ "type": "switch", "name": "s0" })).unwrap();
    assert_eq!(call(&context, "query-net-addresses", json!({ "name": "s0" })).unwrap(), json!([]));
    let missing = call(&context, "query-net-addresses", json!({ "name": "s1" })).unwrap_err();
    assert_eq!(missing.class, Class::DeviceNotFound);
    assert!(refused(&context, "query-net-addresses", json!({})).contains("missing field `name`"));
}
