//! Parser for `key=value,key=value` lists. It fills the same serde types as TOML and QMP.
//!
//! All lists of flags are parsed here. A comma inside a value is written `,,` (as in QEMU).
//! Booleans are `on|off|yes|no|true|false`. Sizes take the units of [`size_units`], also as KiB or
//! KB.

use std::fmt;
use std::str::FromStr;

use serde::de::value::StrDeserializer;
use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Visitor};

/// The units of sizes, powers of 1024, as help texts and errors list them. A macro, because they
/// are part of constant texts.
macro_rules! size_units {
    () => {
        "K, M, G, T, P or E"
    };
}
pub(crate) use size_units;

/// What the units mean, for help texts and errors.
macro_rules! size_rule {
    () => {
        "powers of 1024: 10M, 10MB and 10MiB are the same"
    };
}
pub(crate) use size_rule;

/// Keys whose numbers may have a size suffix. The others are plain counts: `queues=1K` is a typing
/// error.
const SIZE_KEYS: [&str; 11] = [
    "size",
    "block-size",
    "cache-size",
    "cluster_size",
    "bps",
    "bps-read",
    "bps-write",
    "bps-rx",
    "bps-tx",
    "iops-size",
    "pps-size",
];

/// Keys whose values are paths.
const PATH_KEYS: [&str; 5] = ["file", "socket", "mountpoint", "netns", "tls-certificates"];

/// The error for a wrong value of `workers`.
pub(crate) const WORKERS: &str = "wants default, per-queue, per-cpu, auto or a number";

/// The highest CPU number in a list. It limits the memory for a list like `0-99999999` (Linux:
/// NR_CPUS is at most 8192).
const CPU_MAX: usize = 8191;

/// What is wrong with a list: one sentence without a full stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyvalError(String);

impl fmt::Display for KeyvalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for KeyvalError {}

impl de::Error for KeyvalError {
    fn custom<T: fmt::Display>(msg: T) -> Self {
        Self(msg.to_string())
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        unknown_key(field, expected)
    }

    fn missing_field(field: &'static str) -> Self {
        Self(format!("key `{field}` is missing"))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self(format!("`{variant}` is none of {}", expected.join(", ")))
    }
}

/// Returns the error for an unknown key: which key was probably meant, and all keys.
pub(crate) fn unknown_key(key: &str, keys: &[&str]) -> KeyvalError {
    let meant = match closest(key, keys) {
        Some(meant) => format!(" (did you mean `{meant}`?)"),
        None => String::new(),
    };
    KeyvalError(format!("unknown key `{key}`{meant}; the keys are {}", keys.join(", ")))
}

/// Returns the word that a mistyped one probably stands for: at most a third of its letters differ,
/// or it is a beginning or an end of only one word.
pub(crate) fn closest<'a>(typed: &str, words: &[&'a str]) -> Option<&'a str> {
    /// Bytes of a word that is compared: no key or name is longer. The distance needs memory for
    /// each pair of letters.
    const LONGEST: usize = 64;
    if typed.len() > LONGEST {
        return None;
    }
    let distance = |word: &&str| strsim::damerau_levenshtein(typed, word);
    let limit = (typed.chars().count() / 3).max(1);
    if let Some(best) = words.iter().min_by_key(|word| distance(word)).filter(|word| distance(word) <= limit)
    {
        return Some(best);
    }
    let mut longer = words.iter().filter(|word| {
        typed.len() >= 3 && (word.starts_with(typed) || word.ends_with(typed) || typed.starts_with(**word))
    });
    longer.next().filter(|_| longer.next().is_none()).copied()
}

/// Parses a whole list into `T`. Can be used as a `value_parser` of clap.
pub(crate) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, KeyvalError> {
    parse_keys(text, &|_, _| true)
}

/// Parses a whole list into `T`. `belongs` gets the value of `type`, if there is one, and a key. It
/// returns whether an error message should list that key.
pub(crate) fn parse_keys<T: DeserializeOwned>(
    text: &str,
    belongs: &dyn Fn(Option<&str>, &str) -> bool,
) -> Result<T, KeyvalError> {
    let pairs = split(text)?;
    let kind = pairs.iter().find(|(key, _)| key == "type").map(|(_, value)| value.as_str());
    let listed = |key: &str| belongs(kind, key);
    let entries = nested(&pairs);
    T::deserialize(Pairs { rest: entries.iter(), value: None, keys: &[], listed: &listed })
}

/// What a key of a list has.
enum Entry<'a> {
    Text(&'a str),
    /// The keys of an object and their values: `limits.iops=5000` is the key `iops` of `limits`.
    Object(Vec<(&'a str, Entry<'a>)>),
}

/// Returns the keys of a list, with the keys of one object together.
fn nested(pairs: &[(String, String)]) -> Vec<(&str, Entry<'_>)> {
    let mut entries: Vec<(&str, Entry<'_>)> = Vec::new();
    for (key, text) in pairs {
        let text = Entry::Text(text);
        let Some((object, key)) = key.split_once('.') else {
            entries.push((key, text));
            continue;
        };
        let known = entries.iter_mut().find_map(|(name, entry)| match entry {
            Entry::Object(keys) if *name == object => Some(keys),
            _ => None,
        });
        match known {
            Some(keys) => keys.push((key, text)),
            None => entries.push((object, Entry::Object(vec![(key, text)]))),
        }
    }
    entries
}

/// Returns the value of a key in a list. None if it is not given, or the list is not valid.
pub(crate) fn value_of(text: &str, key: &str) -> Option<String> {
    split(text).ok()?.into_iter().find(|(name, _)| name == key).map(|(_, value)| value)
}

/// Parses a size in bytes: digits, a fraction if the result is a whole number of bytes, and a unit:
/// B or one of [`size_units`], where 10K, 10KB and 10KiB are the same. Capital letters or not.
pub(crate) fn parse_size(text: &str) -> Result<u64, KeyvalError> {
    let bad = || {
        KeyvalError(format!(
            concat!(
                "`{}` is not a size; write bytes, or a number with ",
                size_units!(),
                " (",
                size_rule!(),
                ")"
            ),
            text
        ))
    };
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let shift = vshunt_types::units::power_of(unit).ok_or_else(bad)?;
    let (whole, fraction) = match number.split_once('.') {
        Some((_, "")) => return Err(bad()),
        Some(parts) => parts,
        None => (number, ""),
    };
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) || fraction.len() > 6 {
        return Err(bad());
    }
    let too_large = || KeyvalError(format!("`{text}` is too large for a size"));
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let scale = 10u128.pow(fraction.len() as u32);
    let fraction: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| bad())? };
    // 64 bits and 6 decimal digits (20 bits) stay below 128 bits.
    let scaled = (u128::from(whole) * scale + fraction).checked_mul(1 << shift).ok_or_else(too_large)?;
    if !scaled.is_multiple_of(scale) {
        return Err(KeyvalError(format!("`{text}` is not a whole number of bytes")));
    }
    u64::try_from(scaled / scale).map_err(|_| too_large())
}

/// Parses a list of CPUs in the format of taskset: `2`, `0-3`, `0-1,6`. Empty for `all`.
pub(crate) fn parse_cpus(text: &str) -> Result<Vec<usize>, KeyvalError> {
    let bad =
        || KeyvalError(format!("`{text}` is not a list of CPUs; write for example 2, 0-3, 0-1,6 or all"));
    if text == "all" {
        return Ok(Vec::new());
    }
    let number = |s: &str| whole::<usize>(s).filter(|n| *n <= CPU_MAX).ok_or_else(bad);
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(bad());
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Ok(cpus)
}

/// Parses a whole number: digits alone. `+1` is none.
pub(crate) fn whole<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

fn parse_bool(text: &str) -> Result<bool, KeyvalError> {
    match text {
        "on" | "yes" | "true" => Ok(true),
        "off" | "no" | "false" => Ok(false),
        _ => Err(KeyvalError(format!("`{text}` is neither on nor off"))),
    }
}

fn split(text: &str) -> Result<Vec<(String, String)>, KeyvalError> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    let mut rest = text;
    loop {
        let end = rest.find([',', '=']).unwrap_or(rest.len());
        let key = &rest[..end];
        if key.is_empty() {
            return Err(KeyvalError("a key is missing; write key=value,key=value".into()));
        }
        let Some(after) = rest[end..].strip_prefix('=') else {
            return Err(KeyvalError(format!(
                "`{key}` has no value; write {key}=… (a comma in a value is `,,`)"
            )));
        };
        if pairs.iter().any(|(k, _)| k == key) {
            return Err(KeyvalError(format!("key `{key}` is given twice")));
        }
        let (value, more) = take_value(after);
        pairs.push((key.to_owned(), value));
        match more {
            Some(more) => rest = more,
            None => return Ok(pairs),
        }
    }
}

/// Returns the value at the start of `text`, with `,,` replaced by `,`, and the text after its
/// comma, if there is one.
fn take_value(text: &str) -> (String, Option<&str>) {
    let mut value = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(',') {
        value.push_str(&rest[..at]);
        match rest[at + 1..].strip_prefix(',') {
            Some(after) => {
                value.push(',');
                rest = after;
            }
            None => return (value, Some(&rest[at + 1..])),
        }
    }
    value.push_str(rest);
    (value, None)
}

struct Pairs<'a> {
    rest: std::slice::Iter<'a, (&'a str, Entry<'a>)>,
    /// The key that was read last, and what it has.
    value: Option<(&'a str, &'a Entry<'a>)>,
    /// The keys of the type. Empty until the type has told them.
    keys: &'static [&'static str],
    /// Whether an error message should list a key.
    listed: &'a dyn Fn(&str) -> bool,
}

impl<'de> de::Deserializer<'de> for Pairs<'_> {
    type Error = KeyvalError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_map(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        keys: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, KeyvalError> {
        visitor.visit_map(Self { keys, ..self })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_some(self)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'de> MapAccess<'de> for Pairs<'_> {
    type Error = KeyvalError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, KeyvalError> {
        let Some((key, entry)) = self.rest.next() else { return Ok(None) };
        self.value = Some((key, entry));
        let name: StrDeserializer<'_, KeyvalError> = (*key).into_deserializer();
        let known = seed.deserialize(name).map_err(|e| match self.keys {
            [] => e,
            keys => {
                let keys: Vec<&str> = keys.iter().copied().filter(|key| (self.listed)(key)).collect();
                unknown_key(key, &keys)
            }
        });
        known.map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, KeyvalError> {
        let (key, entry) =
            self.value.take().ok_or_else(|| de::Error::custom("value asked for before its key"))?;
        let value = match entry {
            Entry::Text(text) => seed.deserialize(Value { key, text }),
            Entry::Object(keys) => {
                seed.deserialize(Pairs { rest: keys.iter(), value: None, keys: &[], listed: &|_| true })
            }
        };
        value.map_err(|KeyvalError(why)| {
            // The derived message for an untagged variant names a Rust type, which does not help
            // users.
            let why = if key == "workers" { WORKERS.to_owned() } else { why };
            KeyvalError(format!("key `{key}`: {why}"))
        })
    }
}

/// Returns whether text of this key is not a string, but a size or a list of CPUs.
pub(crate) fn is_parsed(key: &str) -> bool {
    key == "cpu" || SIZE_KEYS.contains(&key)
}

/// Returns whether values of this key are paths.
pub(crate) fn is_path(key: &str) -> bool {
    PATH_KEYS.contains(&key)
}

/// Returns the value that a text has for a key.
pub(crate) fn value<'a, 'de>(
    key: &'a str,
    text: &'a str,
) -> impl de::Deserializer<'de, Error = KeyvalError> + use<'a, 'de> {
    Value { key, text }
}

#[derive(Clone, Copy)]
struct Value<'a> {
    key: &'a str,
    text: &'a str,
}

impl Value<'_> {
    fn unsigned(&self) -> Result<u64, KeyvalError> {
        if SIZE_KEYS.contains(&self.key) {
            return parse_size(self.text);
        }
        whole(self.text).ok_or_else(|| KeyvalError(format!("`{}` is not a number of 0 or more", self.text)))
    }

    /// Returns the text. In a path, `~/` is an error: the shell expands it only at the start of a
    /// word, which a value is not.
    fn text(&self) -> Result<&str, KeyvalError> {
        match self.text.strip_prefix("~/").filter(|_| PATH_KEYS.contains(&self.key)) {
            Some(rest) => Err(KeyvalError(format!(
                "the shell did not expand `~/`; write $HOME/{rest}, or ./~/{rest} for a folder of the name ~"
            ))),
            None => Ok(self.text),
        }
    }

    fn signed(&self) -> Result<i64, KeyvalError> {
        self.text.parse().map_err(|_| KeyvalError(format!("`{}` is not a number", self.text)))
    }
}

impl<'de> de::Deserializer<'de> for Value<'_> {
    type Error = KeyvalError;

    /// Called for untagged types only: a number if the text looks like one.
    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        match whole(self.text) {
            Some(n) => visitor.visit_u64(n),
            None => visitor.visit_str(self.text),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_bool(parse_bool(self.text)?)
    }

    fn deserialize_u8<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_u64(self.unsigned()?)
    }

    fn deserialize_u16<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_u64(self.unsigned()?)
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_u64(self.unsigned()?)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_u64(self.unsigned()?)
    }

    fn deserialize_i32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_i64(self.signed()?)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_i64(self.signed()?)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_str(self.text()?)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_str(self.text()?)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, KeyvalError> {
        visitor.visit_newtype_struct(self)
    }

    /// CPUs are the only list in the specifications.
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyvalError> {
        visitor.visit_seq(Cpus(parse_cpus(self.text)?.into_iter()))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        keys: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, KeyvalError> {
        let (key, first) = (self.key, keys.first().copied().unwrap_or_default());
        Err(KeyvalError(format!(
            "it has keys of its own; write {key}.{first}=…; they are {}",
            keys.join(", ")
        )))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, KeyvalError> {
        let text: StrDeserializer<'_, KeyvalError> = self.text.into_deserializer();
        visitor.visit_enum(text)
    }

    serde::forward_to_deserialize_any! {
        i8 i16 f32 f64 char bytes byte_buf unit unit_struct tuple tuple_struct map identifier ignored_any
    }
}

struct Cpus(std::vec::IntoIter<usize>);

impl<'de> SeqAccess<'de> for Cpus {
    type Error = KeyvalError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, KeyvalError> {
        self.0.next().map(|cpu| seed.deserialize(cpu.into_deserializer())).transpose()
    }
}

#[cfg(test)]
mod tests;
