//! The configuration file: what it can say, and where in it something is wrong.
//!
//! `config` reads it, for `vshunt serve` and `vshunt config check`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{self, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, Visitor};
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Value};
use vshunt_daemon::Check;
use vshunt_sandbox::Mode;
use vshunt_types::error::Error;
use vshunt_types::spec::{BalanceMode, SocketAccess, SocketMode, WorkerSpec, text_or_number};

use super::args::SandboxArgs;
use super::told::Told;
use super::{Control, LogFormat, Setup};
use crate::keyval;
use crate::metrics::Address;
use crate::values::{QueueNames, Spec, parse_queues};

/// One table of a file, with the places of its keys.
type Section = Spanned<BTreeMap<Spanned<String>, Spanned<Value>>>;

/// Errors of a kind that are listed at most. The search for the next one reads all again.
const WRONG_MAX: usize = 20;

/// Bytes of a file at most.
pub(super) const FILE_MAX: u64 = 16 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct File {
    /// The path of the control socket, or false for none. Absent: the default path.
    #[serde(default)]
    control: Control,
    /// The user, by name or number, that owns the control socket. Absent: that of the daemon.
    #[serde(default, deserialize_with = "text_or_number")]
    control_owner: Option<String>,
    /// The group, by name or number, whose members may use the control socket.
    #[serde(default, deserialize_with = "text_or_number")]
    control_group: Option<String>,
    /// The mode of the control socket, as a string: `0600`, `0660`, `0606` or `0666`. Absent:
    /// `0660` if `control-group` is given, otherwise `0600`.
    control_mode: Option<SocketMode>,
    /// Where metrics are served: `PORT`, `ADDRESS:PORT` or `unix:PATH`, as a string. Absent:
    /// nowhere.
    metrics: Option<Address>,
    /// The file that gets the process id, once everything is served.
    pidfile: Option<PathBuf>,
    /// The polling limit of workers that have none of their own, in microseconds. 0: never poll.
    /// Absent: 50.
    poll_us: Option<u32>,
    /// Whether queues of exports without the key `balance` move to less busy workers: `off`, `auto`
    /// or `dry-run`. Absent: `off`.
    balance: Option<BalanceMode>,
    /// The format of the log: `text`, `json` or `journald`. Absent: `journald` if journald reads
    /// stderr, otherwise `text`.
    log_format: Option<LogFormat>,
    /// What happens on an access that the sandbox does not allow: `on`, `log`, `off` or `kill`.
    /// Absent: `on`.
    sandbox: Option<Mode>,
    /// Whether the system calls of workers are filtered, too.
    #[serde(default)]
    sandbox_workers: bool,
    /// Folders in which clients may name files, sockets and mountpoints.
    #[serde(default)]
    allow_path: Vec<PathBuf>,
    /// Settings of worker 0, which always exists: the keys of a worker without `kind` and `export`.
    first_worker: Option<Section>,
    /// The disks; one `[[disk]]` for each.
    #[serde(default)]
    disk: Vec<Section>,
    /// The networks; one `[[net]]` for each.
    #[serde(default)]
    net: Vec<Section>,
    /// The workers besides worker 0; one `[[worker]]` for each.
    #[serde(default)]
    worker: Vec<Section>,
    /// The exports; one `[[export]]` for each.
    #[serde(default)]
    export: Vec<Section>,
    /// Queues that start on another worker than the key `workers` of their export says; one
    /// `[[attach]]` for each.
    #[serde(default)]
    attach: Vec<Section>,
}

/// Queues that start on a certain worker.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct AttachSpec {
    /// The queues: `EXPORT:INDEX`, `EXPORT:FIRST-LAST`, or `EXPORT` for all.
    #[serde(deserialize_with = "queue_names")]
    pub(crate) queues: QueueNames,
    /// The name of a worker: that of a `[[worker]]`, `EXPORT/N` for a worker that an export makes,
    /// or `worker-N` for the Nth `[[worker]]` if it has no name; or `0`, the first worker.
    #[serde(deserialize_with = "name_or_number")]
    pub(crate) worker: String,
}

impl Check for AttachSpec {
    fn check(&self) -> Result<(), Error> {
        match self.worker.is_empty() {
            true => Err(Error::invalid("key `worker`: give the name of a worker, or 0")),
            false => Ok(()),
        }
    }
}

impl Spec for AttachSpec {
    fn suggestion(bare: &str) -> String {
        format!("queues={bare},worker=0")
    }
}

fn queue_names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<QueueNames, D::Error> {
    parse_queues(&String::deserialize(deserializer)?).map_err(de::Error::custom)
}

fn name_or_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    text_or_number(deserializer).map(Option::unwrap_or_default)
}

/// A place in a file, from 1 on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    line: usize,
    column: usize,
}

impl Place {
    /// Returns the place of a byte of a text.
    fn of(text: &str, at: usize) -> Self {
        let at = (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
        let before = &text[..at.unwrap_or(0)];
        let line = before.rsplit('\n').next().unwrap_or_default();
        Self { line: before.matches('\n').count() + 1, column: line.chars().count() + 1 }
    }

    /// Returns the places of bytes of a text, which are in order. The text is read once.
    fn of_all(text: &str, at: &[usize]) -> Vec<Self> {
        let (mut done, mut place) = (0, Self { line: 1, column: 1 });
        let next = |at: &usize| {
            let Some(between) = text.get(done..*at) else { return Self::of(text, *at) };
            let here = Self::of(between, between.len());
            place = match here.line {
                1 => Self { line: place.line, column: place.column + here.column - 1 },
                lines => Self { line: place.line + lines - 1, column: here.column },
            };
            done = *at;
            place
        };
        at.iter().map(next).collect()
    }
}

/// Where the parts of a [`Setup`] come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    /// The file, as the user wrote its path.
    pub(super) file: PathBuf,
    pub(super) disks: Vec<Place>,
    pub(super) nets: Vec<Place>,
    pub(super) exports: Vec<Place>,
    pub(super) attach: Vec<Place>,
    /// The keys outside of sections.
    keys: BTreeMap<String, Place>,
    /// The indices of exports of which only the name is known.
    pub(super) unfinished: BTreeSet<usize>,
    /// Whether there are sections whose names are not known.
    pub(super) lacks_names: bool,
}

impl Places {
    /// Returns `FILE:LINE:COLUMN: ` for a key outside of sections, and nothing if the file does not
    /// have it.
    pub(super) fn of_key(&self, key: &str) -> String {
        self.keys.get(key).map_or_else(String::new, |place| self.at(*place))
    }

    /// Returns `FILE:LINE:COLUMN: ` for an item of a list, and nothing for one of a flag.
    pub(super) fn shown(&self, places: &[Place], item: usize) -> String {
        places.get(item).map_or_else(String::new, |place| self.at(*place))
    }

    fn at(&self, Place { line, column }: Place) -> String {
        format!("{}:{line}:{column}: ", self.file.display())
    }
}

/// Parses a file. `path` is for messages. Returns also all that is wrong, each with its place. If
/// something is, the setup has what is known of the rest, for checks of it.
pub(super) fn parse(path: &std::path::Path, text: &str) -> (Setup, Told) {
    let mut places = Places { file: path.to_owned(), ..Places::default() };
    let mut found = Vec::new();
    let mut tell = |Wrong { at, why }: Wrong| found.push((at.unwrap_or(0), why));
    let Some(Whole { file, keys, lacks_sections }) = whole(text, &mut tell) else {
        let wrong = shown(&places, text, found);
        return (Setup { places, ..Setup::default() }, wrong);
    };
    let (keys, at): (Vec<_>, Vec<_>) = keys.into_iter().unzip();
    places.keys = keys.into_iter().zip(Place::of_all(text, &at)).collect();
    let first = file.first_worker.map(|section| sections("first-worker", vec![section], &mut tell));
    let mut setup = Setup {
        control: file.control,
        control_access: SocketAccess {
            owner: file.control_owner,
            group: file.control_group,
            mode: file.control_mode,
        },
        metrics: file.metrics,
        pidfile: file.pidfile,
        poll_us: file.poll_us,
        balance: file.balance,
        log_format: file.log_format,
        first_worker: first.and_then(|list: Sections<WorkerSpec>| list.items.into_iter().next()),
        sandbox: SandboxArgs {
            mode: file.sandbox,
            workers: file.sandbox_workers,
            allow_paths: file.allow_path,
        },
        ..Setup::default()
    };
    let disks = sections("disk", file.disk, &mut tell);
    let nets = sections("net", file.net, &mut tell);
    let workers = sections("worker", file.worker, &mut tell);
    let exports = sections("export", file.export, &mut tell);
    let attach = sections("attach", file.attach, &mut tell);
    let all = |starts: &[usize]| Place::of_all(text, starts);
    places.disks = all(&disks.starts);
    places.nets = all(&nets.starts);
    places.exports = all(&exports.starts);
    places.attach = all(&attach.starts);
    places.unfinished = exports.unfinished;
    places.lacks_names = lacks_sections || disks.lost || nets.lost || workers.lost || exports.lost;
    let wrong = shown(&places, text, found);
    setup = Setup { disks: disks.items, nets: nets.items, workers: workers.items, ..setup };
    (Setup { exports: exports.items, attach: attach.items, places, ..setup }, wrong)
}

/// Returns messages with their places, in the order of the file.
fn shown(places: &Places, text: &str, mut found: Vec<(usize, String)>) -> Told {
    found.sort_by_key(|(at, _)| *at);
    let mut told = Told::default();
    found.into_iter().for_each(|(at, why)| told.tell(|| places.at(Place::of(text, at)) + &why));
    told
}

/// The keys of a file outside of sections, and its sections unread.
struct Whole {
    file: File,
    /// The keys and the bytes where they are, in order.
    keys: Vec<(String, usize)>,
    /// Whether sections are left out, because their name is wrong.
    lacks_sections: bool,
}

/// Reads a file without its sections. A key that is wrong is told and left out. None: the text is
/// not TOML, or has too many errors.
fn whole(text: &str, tell: &mut impl FnMut(Wrong)) -> Option<Whole> {
    let mut told = |e: &toml::de::Error, why: String| {
        let at = e.span().map_or(0, |span| span.start);
        tell(Wrong::at(at, why));
        at
    };
    let (mut table, invalid) = DeTable::parse_recoverable(text);
    if !invalid.is_empty() {
        // The rest of a line may be taken for something else.
        let mut lines = BTreeSet::new();
        let starts: Vec<_> = invalid.iter().map(|e| e.span().map_or(0, |span| span.start)).collect();
        let all = invalid.iter().zip(Place::of_all(text, &starts));
        for (e, _) in all.filter(|(_, place)| lines.insert(place.line)).take(WRONG_MAX) {
            told(e, e.message().to_owned());
        }
        return None;
    }
    let keys = table.get_ref().keys().map(|key| (key.get_ref().to_string(), key.span().start));
    let mut keys: Vec<_> = keys.collect();
    keys.sort_by_key(|(_, at)| *at);
    let mut lacks_sections = false;
    for _ in 0..WRONG_MAX {
        let e = match File::deserialize(toml::de::Deserializer::from(table.clone())) {
            Ok(file) => return Some(Whole { file, keys, lacks_sections }),
            Err(e) => e,
        };
        let at = told(&e, reword(e.message()));
        let is_wrong = |key: &Range<usize>, value: &Range<usize>| key.contains(&at) || value.contains(&at);
        let mut entries = table.get_ref().iter();
        let (key, value) = entries.find(|(key, value)| is_wrong(&key.span(), &value.span()))?;
        lacks_sections |= matches!(value.get_ref(), DeValue::Table(_) | DeValue::Array(_));
        let key = key.clone();
        table.get_mut().remove(&key);
    }
    None
}

/// Says what serde says about a whole file as flags say it.
fn reword(message: &str) -> String {
    if let Some(words) = message.strip_prefix("unknown field ") {
        let mut words = words.split('`').skip(1).step_by(2);
        let key = words.next().unwrap_or_default();
        return keyval::unknown_key(key, &words.collect::<Vec<_>>()).to_string();
    }
    if message.starts_with("invalid type: map, expected a sequence") {
        return "there can be several of this section; write its name in two brackets, for example [[disk]]"
            .into();
    }
    message.replace('\n', "; ")
}

/// What is wrong, and the byte where it is.
#[derive(Debug)]
struct Wrong {
    at: Option<usize>,
    why: String,
}

impl Wrong {
    fn at(at: usize, why: String) -> Self {
        Self { at: Some(at), why }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for Wrong {}

impl de::Error for Wrong {
    fn custom<T: fmt::Display>(why: T) -> Self {
        Self { at: None, why: why.to_string() }
    }

    fn missing_field(field: &'static str) -> Self {
        Self { at: None, why: format!("key `{field}` is missing") }
    }
}

/// The sections of one kind, and the bytes where they start.
struct Sections<T> {
    items: Vec<T>,
    starts: Vec<usize>,
    /// The indices of items that are not complete, because something is wrong with them.
    unfinished: BTreeSet<usize>,
    /// Whether a section is left out, because it has no name.
    lost: bool,
}

/// Reads all sections of a kind. `tell` gets what is wrong with each.
fn sections<T: Spec>(kind: &str, tables: Vec<Section>, tell: &mut impl FnMut(Wrong)) -> Sections<T> {
    let mut out =
        Sections { items: Vec::new(), starts: Vec::new(), unfinished: BTreeSet::new(), lost: false };
    for (index, table) in tables.into_iter().enumerate() {
        let start = table.span().start;
        match section(kind, index, table, tell) {
            Ok(item) => out.items.push(item),
            Err(Some(item)) => {
                out.unfinished.insert(out.items.len());
                out.items.push(item);
            }
            Err(None) => {
                out.lost = true;
                continue;
            }
        }
        out.starts.push(start);
    }
    out
}

/// Reads a section.
///
/// # Errors
/// Something is wrong, and `tell` got all of it. The result is what other sections may refer to.
fn section<T: Spec>(
    kind: &str,
    index: usize,
    table: Section,
    tell: &mut impl FnMut(Wrong),
) -> Result<T, Option<T>> {
    let start = table.span().start;
    let mut entries: Vec<_> = table.into_inner().into_iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    let texts = entries.clone();
    let text = |wanted: &str| {
        let (_, value) = texts.iter().find(|(key, _)| key.as_ref() == wanted)?;
        value.as_ref().as_str().map(str::to_owned)
    };
    let named = text("name").or_else(|| T::default_name(&|key| text(key)));
    let name = match (kind, &named) {
        ("first-worker", _) => kind.to_owned(),
        (_, Some(name)) => format!("{kind} {name}"),
        (_, None) => format!("{kind} number {}", index + 1),
    };
    for (key, value) in [("name", named.clone()), ("type", T::default_type(&|key| text(key)))] {
        if let Some(value) = value.filter(|_| !texts.iter().any(|(given, _)| given.as_ref() == key)) {
            entries
                .push((Spanned::new(start..start, key.to_owned()), Spanned::new(start..start, value.into())));
        }
    }
    let unfinished = || named.and_then(|name| T::unfinished(name, &|key| text(key)));
    let of_type = text("type");
    let listed = |key: &str| T::is_key_of(of_type.as_deref(), key);
    let mut found = 0;
    let item = loop {
        let keys = Keys { rest: entries.clone().into_iter(), value: None, keys: &[], listed: &listed };
        let Wrong { at, why } = match T::deserialize(keys) {
            Ok(item) if found == 0 => break item,
            Ok(_) => return Err(unfinished()),
            Err(wrong) => wrong,
        };
        let is_wrong = |(key, value): &(Spanned<String>, Spanned<Value>)| {
            at == Some(key.span().start) || at == Some(value.span().start)
        };
        let culprit = entries.iter().position(is_wrong);
        // A key that is missing may be one of those that are wrong.
        if culprit.is_some() || found == 0 {
            tell(Wrong::at(at.unwrap_or(start), format!("{name}: {why}")));
        }
        found += 1;
        match culprit.filter(|_| found < WRONG_MAX) {
            Some(culprit) => drop(entries.remove(culprit)),
            None => return Err(unfinished()),
        }
    };
    let Err(e) = item.check() else { return Ok(item) };
    let why = e.to_string();
    // The message names a key as flags do.
    let is_named = |key: &str| why.split([' ', ':', ',']).any(|word| word.starts_with(&format!("{key}=")));
    let named = texts.iter().find(|(key, _)| is_named(key.as_ref()));
    tell(Wrong::at(named.map_or(start, |(key, _)| key.span().start), why));
    Err(unfinished())
}

/// The keys and values of a section.
struct Keys<'a> {
    rest: std::vec::IntoIter<(Spanned<String>, Spanned<Value>)>,
    /// The value of the key that was read last, and that key.
    value: Option<(Spanned<String>, Spanned<Value>)>,
    /// The keys of the type. Empty until the type has told them.
    keys: &'static [&'static str],
    /// Whether an error message should list a key.
    listed: &'a dyn Fn(&str) -> bool,
}

impl<'de> Deserializer<'de> for Keys<'_> {
    type Error = Wrong;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_map(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        keys: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        visitor.visit_map(Self { keys, ..self })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_some(self)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'de> MapAccess<'de> for Keys<'_> {
    type Error = Wrong;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Wrong> {
        let Some((key, value)) = self.rest.next() else { return Ok(None) };
        let name: StrDeserializer<'_, Wrong> = key.as_ref().as_str().into_deserializer();
        let known = seed.deserialize(name).map_err(|_| {
            let keys: Vec<&str> = self.keys.iter().copied().filter(|key| (self.listed)(key)).collect();
            Wrong::at(key.span().start, keyval::unknown_key(key.as_ref(), &keys).to_string())
        });
        self.value = Some((key, value));
        known.map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Wrong> {
        let (key, value) = self.value.take().ok_or_else(|| <Wrong as de::Error>::custom("no value"))?;
        let (at, key) = (value.span().start, key.into_inner());
        let wrong = |why: String| Wrong::at(at, format!("key `{key}`: {why}"));
        match value.into_inner() {
            Value::String(text) if keyval::is_parsed(&key) => {
                seed.deserialize(keyval::value(&key, &text)).map_err(|e| wrong(e.to_string()))
            }
            Value::String(text) if keyval::is_path(&key) && text.starts_with("~/") => {
                Err(wrong("`~/` is not expanded in a file; write the whole path".into()))
            }
            Value::Table(table) => {
                // Its keys have no places of their own.
                let here = |(key, value)| (Spanned::new(at..at, key), Spanned::new(at..at, value));
                let rest = table.into_iter().map(here).collect::<Vec<_>>().into_iter();
                let keys = Keys { rest, value: None, keys: &[], listed: &|_| true };
                seed.deserialize(keys).map_err(|Wrong { why, .. }| wrong(why))
            }
            value => seed.deserialize(value).map_err(|e: toml::de::Error| match key.as_str() {
                // The message for an untagged enum names a Rust type.
                "workers" => wrong(keyval::WORKERS.into()),
                "limits" => {
                    wrong("it has keys of its own; write for example limits = { iops = 5000 }".into())
                }
                _ => wrong(e.message().to_owned()),
            }),
        }
    }
}

#[cfg(test)]
mod tests;
