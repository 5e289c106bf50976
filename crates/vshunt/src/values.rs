//! Parsers for the values of flags. They also check that a value is valid by itself.
//!
//! Clap calls them and puts the flag and its value before their error messages.

use std::borrow::Cow;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde::de::value::StrDeserializer;
use vshunt_daemon::{Check, check_disk_size};
use vshunt_types::spec::{
    BalanceMode, CopyMode, DiskSpec, ExportKind, ExportSpec, Format, NetSpec, WorkerSpec, Workers,
};

use crate::keyval;

/// A list of CPUs. A newtype, because clap reads a bare `Vec` as an option that may be repeated.
#[derive(Clone, Debug)]
pub(crate) struct Cpus(pub(crate) Vec<usize>);

pub(crate) fn cpus(text: &str) -> Result<Cpus, String> {
    let cpus = keyval::parse_cpus(text).map_err(|e| e.to_string())?;
    checked(WorkerSpec { cpu: Some(cpus.clone()), ..WorkerSpec::default() }, Cpus(cpus))
}

pub(crate) fn nice(text: &str) -> Result<i32, String> {
    let nice = number(text)?;
    checked(WorkerSpec { nice: Some(nice), ..WorkerSpec::default() }, nice)
}

pub(crate) fn balance_mode(text: &str) -> Result<BalanceMode, String> {
    let found = BalanceMode::ALL.iter().find(|(name, _)| *name == text);
    found.map(|(_, mode)| *mode).ok_or_else(|| format!("`{text}` is none of off, auto, dry-run"))
}

pub(crate) fn poll_us(text: &str) -> Result<u32, String> {
    let poll_us = number(text)?;
    checked(WorkerSpec { poll_us: Some(poll_us), ..WorkerSpec::default() }, poll_us)
}

pub(crate) fn worker_name(text: &str) -> Result<String, String> {
    checked(WorkerSpec { name: Some(text.to_owned()), ..WorkerSpec::default() }, text.to_owned())
}

/// Parses a number of bytes, with an optional unit: see [`keyval::parse_size`].
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    keyval::parse_size(text).map_err(|e| e.to_string())
}

/// A size of a disk as users write it: absolute, or relative to the present one (`+1G`, `-512M`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SizeChange {
    To(u64),
    By(u64),
    Less(u64),
}

impl SizeChange {
    /// Returns the new size. None: it is below 0 or too large.
    pub(crate) fn of(self, old: u64) -> Option<u64> {
        match self {
            Self::To(size) => Some(size),
            Self::By(more) => old.checked_add(more),
            Self::Less(less) => old.checked_sub(less),
        }
    }
}

pub(crate) fn size_change(text: &str) -> Result<SizeChange, String> {
    match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(more), _) => bytes(more).map(SizeChange::By),
        (_, Some(less)) => bytes(less).map(SizeChange::Less),
        _ => bytes(text).map(SizeChange::To),
    }
}

/// Parses the new size of a disk in use. The daemon checks the result of a relative one.
pub(crate) fn disk_size_change(text: &str) -> Result<SizeChange, String> {
    match size_change(text)? {
        SizeChange::To(size) => {
            check_disk_size(size).map(|()| SizeChange::To(size)).map_err(|e| e.to_string())
        }
        change => Ok(change),
    }
}

/// Returns the parser for formats of images.
pub(crate) fn image_format() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["qcow2", "raw"]).map(|f| if f == "raw" { Format::Raw } else { Format::Qcow2 })
}

/// Returns the parser for copy modes of mirrors.
pub(crate) fn copy_mode() -> impl TypedValueParser<Value = CopyMode> {
    PossibleValuesParser::new(["background", "write-blocking"])
        .map(|m| if m == "background" { CopyMode::Background } else { CopyMode::WriteBlocking })
}

fn number<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is not a whole number in range"))
}

fn checked<T>(spec: impl Check, value: T) -> Result<T, String> {
    spec.check().map(|()| value).map_err(|e| e.to_string())
}

/// Returns the name for the disk in a file: the name of the file without its ending and without
/// characters that names cannot have. `other` if nothing is left.
pub(crate) fn name_of(file: &Path, other: &str) -> String {
    /// A name has at most 64 characters, and a number may follow.
    const LONGEST: usize = 48;
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let fits = stem.chars().filter(|c| c.is_ascii_alphanumeric() || "-_.".contains(*c));
    // The name is also an argument of commands, and a part of the names of files.
    let name: String = fits.skip_while(|c| !c.is_ascii_alphanumeric()).take(LONGEST).collect();
    if name.is_empty() { other.to_owned() } else { name }
}

/// Queues of an export as users write them: `vm0:3`, `vm0:0-3`, `vm0:*` or `vm0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueNames {
    pub(crate) export: String,
    /// The indices. None: all queues of the export.
    pub(crate) indices: Option<RangeInclusive<u16>>,
}

impl fmt::Display for QueueNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = &self.export;
        match self.indices.as_ref().map(|indices| (indices.start(), indices.end())) {
            None => f.write_str(export),
            Some((first, last)) if first == last => write!(f, "{export}:{first}"),
            Some((first, last)) => write!(f, "{export}:{first}-{last}"),
        }
    }
}

/// Parses [`QueueNames`].
pub(crate) fn parse_queues(text: &str) -> Result<QueueNames, String> {
    let bad = || {
        format!(
            "`{text}` names no queues; write EXPORT:INDEX, EXPORT:FIRST-LAST or EXPORT, for example vm0:3"
        )
    };
    let (export, indices) = match text.rsplit_once(':') {
        None | Some((_, "*")) => (text.strip_suffix(":*").unwrap_or(text), None),
        Some((export, indices)) => {
            let (first, last) = indices.split_once('-').unwrap_or((indices, indices));
            let number = |text: &str| keyval::whole::<u16>(text).ok_or_else(bad);
            (export, Some(number(first)?..=number(last)?))
        }
    };
    if export.is_empty() || indices.as_ref().is_some_and(RangeInclusive::is_empty) {
        return Err(bad());
    }
    Ok(QueueNames { export: export.to_owned(), indices })
}

/// A specification that a flag takes as a list of keys and values.
pub(crate) trait Spec: DeserializeOwned + Check {
    /// Returns the list that the user probably means by a bare value.
    fn suggestion(bare: &str) -> String;

    /// The name, if the list does not give one. `value` returns the value of a key.
    fn default_name(_value: &dyn Fn(&str) -> Option<String>) -> Option<String> {
        None
    }

    /// The `type`, if the list does not give one.
    fn default_type(_value: &dyn Fn(&str) -> Option<String>) -> Option<String> {
        None
    }

    /// Returns what others may refer to in a specification of this name that is not valid.
    fn unfinished(_name: String, _value: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        None
    }

    /// Returns whether a key belongs to specifications of this `type`.
    fn is_key_of(_kind: Option<&str>, _key: &str) -> bool {
        true
    }
}

impl Spec for DiskSpec {
    fn suggestion(bare: &str) -> String {
        format!("name={},file={bare}", name_of(Path::new(bare), "d0"))
    }

    fn default_name(value: &dyn Fn(&str) -> Option<String>) -> Option<String> {
        let file = value("file").map(|file| name_of(Path::new(&file), "disk"));
        file.or_else(|| value("uri").map(|_| "nbd".to_owned()))
    }

    fn unfinished(name: String, _value: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        Some(Self { name, ..Self::default() })
    }
}

impl Spec for ExportSpec {
    fn suggestion(bare: &str) -> String {
        let socket = if bare.contains('/') { bare } else { "/tmp/vm0.sock" };
        format!("type=vhost-user-blk,name=vm0,disk=d0,socket={socket}, with the name of your disk for d0")
    }

    fn default_name(value: &dyn Fn(&str) -> Option<String>) -> Option<String> {
        ["disk", "tap", "net"].into_iter().find_map(value)
    }

    fn default_type(value: &dyn Fn(&str) -> Option<String>) -> Option<String> {
        let of = [
            ("mountpoint", "fuse"),
            ("listen", "nbd"),
            ("tap", "uplink"),
            ("net", "vhost-user-net"),
            ("disk", "vhost-user-blk"),
        ];
        of.into_iter().find(|(key, _)| value(key).is_some()).map(|(_, kind)| kind.to_owned())
    }

    fn unfinished(name: String, value: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        let path = |key| value(key).map(Into::into);
        // It may have workers of any name.
        let workers = Workers::PerQueue;
        Some(Self {
            name,
            workers,
            socket: path("socket"),
            mountpoint: path("mountpoint"),
            listen: value("listen").and_then(|text| text.parse().ok()),
            ..Self::default()
        })
    }

    fn is_key_of(kind: Option<&str>, key: &str) -> bool {
        let kind = kind.map(StrDeserializer::<serde::de::value::Error>::new);
        let kind = kind.and_then(|kind| ExportKind::deserialize(kind).ok());
        kind.is_none_or(|kind| vshunt_daemon::is_key_of(kind, key))
    }
}

impl Spec for NetSpec {
    fn suggestion(bare: &str) -> String {
        format!("type=tap,name=n0,ifname={bare}")
    }

    fn default_name(value: &dyn Fn(&str) -> Option<String>) -> Option<String> {
        value("ifname")
    }

    fn unfinished(name: String, _value: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        let any = keyval::parse("type=tap,name=n").ok();
        any.map(|any: Self| Self { name, ..any })
    }

    fn is_key_of(kind: Option<&str>, key: &str) -> bool {
        // A switch takes none of the keys of a tap.
        kind != Some("switch") || ["type", "name"].contains(&key)
    }
}

impl Spec for WorkerSpec {
    fn suggestion(bare: &str) -> String {
        match keyval::parse_cpus(bare) {
            Ok(_) => format!("cpu={}", bare.replace(',', ",,")),
            Err(_) => format!("name={bare}"),
        }
    }

    fn unfinished(name: String, _value: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        Some(Self { name: Some(name), ..Self::default() })
    }
}

/// Parses a list of keys and values, and checks that it is valid by itself.
pub(crate) fn spec<T: Spec>(text: &str) -> Result<T, String> {
    let first = text.split(',').next().unwrap_or_default();
    if !first.is_empty() && !first.contains('=') {
        return Err(format!("`{first}` has no key; write {}", T::suggestion(first)));
    }
    let value = |key: &str| keyval::value_of(text, key);
    let defaults = [("name", T::default_name(&value)), ("type", T::default_type(&value))];
    let mut text = Cow::from(text);
    for (key, default) in defaults {
        if let Some(default) = default.filter(|_| value(key).is_none()) {
            text.to_mut().push_str(&format!(",{key}={}", default.replace(',', ",,")));
        }
    }
    let spec: T = keyval::parse_keys(&text, &T::is_key_of).map_err(|e| e.to_string())?;
    spec.check().map(|()| spec).map_err(|e| e.to_string())
}

pub(crate) fn boxed_export(text: &str) -> Result<Box<ExportSpec>, String> {
    spec(text).map(Box::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_value_is_told_what_to_write() {
        let cases = [
            (spec::<DiskSpec>("/tmp/a b.img,readonly=on").unwrap_err(), "name=ab,file=/tmp/a b.img"),
            (spec::<DiskSpec>("..").unwrap_err(), "name=d0,file=.."),
            (spec::<ExportSpec>("/tmp/s").unwrap_err(), "disk=d0,socket=/tmp/s"),
            (spec::<NetSpec>("vs0").unwrap_err(), "type=tap,name=n0,ifname=vs0"),
            (spec::<WorkerSpec>("0-3").unwrap_err(), "cpu=0-3"),
            (spec::<WorkerSpec>("fast").unwrap_err(), "name=fast"),
        ];
        for (said, want) in cases {
            assert!(said.contains(" has no key; write ") && said.contains(want), "{said}");
        }
        assert!(spec::<DiskSpec>("").unwrap_err().contains("a key is missing"));
    }

    #[test]
    fn a_name_follows_from_the_file_disk_or_network() {
        let name = |text| spec::<DiskSpec>(text).unwrap().name;
        assert_eq!(name("file=/images/my vm.tar.qcow2,format=qcow2"), "myvm.tar");
        assert_eq!((name("file=/images/-..img"), name("name=d0,file=a.img")), ("disk".into(), "d0".into()));
        assert_eq!(name(&format!("file={}.img", "x".repeat(200))), "x".repeat(48));
        assert!(spec::<DiskSpec>("format=ram,size=1M").unwrap_err().contains("`name` is missing"));
        let name = |text| spec::<ExportSpec>(text).unwrap().name;
        assert_eq!(name("type=vhost-user-blk,disk=d0,socket=/s"), "d0");
        assert_eq!(name("type=vhost-user-net,net=n0,socket=/s"), "n0");
        assert_eq!(name("type=uplink,net=s0,tap=t0"), "t0");
        assert_eq!(spec::<NetSpec>("type=tap,ifname=vs0").unwrap().name, "vs0");
        assert!(
            spec::<ExportSpec>("type=fuse,disk=a,,name=b,mountpoint=/m")
                .unwrap_err()
                .contains("\"a,name=b\"")
        );
        assert!(spec::<WorkerSpec>("cpu=0").unwrap().name.is_none());
    }

    #[test]
    fn an_unknown_key_is_told_what_was_meant_and_the_keys_of_its_type() {
        let said = spec::<ExportSpec>("type=fuse,name=m,disk=d,queue=2").unwrap_err();
        assert!(said.starts_with("unknown key `queue` (did you mean `queues`?); the keys are "), "{said}");
        assert!(said.contains("mountpoint") && !said.contains("socket") && !said.contains("mac"), "{said}");
        let said = spec::<ExportSpec>("name=m,sokcet=/s").unwrap_err();
        assert!(said.contains("did you mean `socket`?") && said.contains("mountpoint"), "{said}");
        let said = spec::<ExportSpec>("type=vhost-user-blk,name=m,mount=/s").unwrap_err();
        assert!(!said.contains("mean") && said.contains("serial") && !said.contains("mountpoint"), "{said}");
    }

    #[test]
    fn numbers_have_bounds() {
        assert_eq!((poll_us("50"), nice("-20")), (Ok(50), Ok(-20)));
        for said in [poll_us("x").map(drop), poll_us("9999999").map(drop), nice("20").map(drop)] {
            said.unwrap_err();
        }
        assert!(disk_size_change("1000").unwrap_err().contains("not a multiple of 512"));
    }

    #[test]
    fn a_size_may_be_a_change() {
        let of = |text| disk_size_change(text).unwrap().of(1 << 30);
        assert_eq!((of("2G"), of("+64M"), of("-1G")), (Some(2 << 30), Some((1 << 30) + (64 << 20)), Some(0)));
        assert_eq!((of("-2G"), disk_size_change("+1").unwrap().of(u64::MAX)), (None, None));
        for text in ["+", "-", "+-1", "--1G", "1G+"] {
            disk_size_change(text).unwrap_err();
        }
    }
}
