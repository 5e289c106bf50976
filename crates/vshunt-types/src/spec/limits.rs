//! Limits of operations or packets, and of bytes per second: the requests of users.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};

/// The largest rate, and the most operations or bytes of a burst, as in QEMU.
pub const LIMIT_MAX: u64 = 1_000_000_000_000_000;

/// A rate that is allowed for a limited time, as users write it: `20000:10s` is 20000 per second
/// for 10 seconds, `20000` is the same for one second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub struct Burst {
    /// Operations, packets or bytes per second.
    pub rate: u64,
    /// How long it may last after a rest.
    pub seconds: u64,
}

impl fmt::Display for Burst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seconds {
            1 => write!(f, "{}", self.rate),
            seconds => write!(f, "{}:{seconds}s", self.rate),
        }
    }
}

impl From<Burst> for String {
    fn from(burst: Burst) -> Self {
        burst.to_string()
    }
}

impl FromStr for Burst {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "`{text}` is not a burst; write RATE:SECONDSs, for example 20000:10s, or RATE for one second"
            )
        };
        let (rate, seconds) = text.split_once(':').unwrap_or((text, "1s"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let number = |text: &str| digits(text).then(|| text.parse().ok()).flatten();
        let unit = rate.find(|c: char| !c.is_ascii_digit()).unwrap_or(rate.len());
        let (rate, unit) = rate.split_at(unit);
        let shift = crate::units::power_of(unit).ok_or_else(bad)?;
        let rate: u64 = number(rate).ok_or_else(bad)?;
        let rate = rate.checked_mul(1 << shift).ok_or_else(|| format!("`{text}` is too large for a rate"))?;
        let seconds = seconds.strip_suffix('s').unwrap_or(seconds);
        Ok(Self { rate, seconds: number(seconds).ok_or_else(bad)? })
    }
}

impl<'de> Deserialize<'de> for Burst {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrNumber;
        impl Visitor<'_> for TextOrNumber {
            type Value = Burst;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a burst: a number, or text like 20000:10s")
            }

            fn visit_u64<E: de::Error>(self, rate: u64) -> Result<Burst, E> {
                Ok(Burst { rate, seconds: 1 })
            }

            fn visit_i64<E: de::Error>(self, rate: i64) -> Result<Burst, E> {
                let rate = u64::try_from(rate).map_err(|_| E::custom(format!("{rate} is less than 0")))?;
                self.visit_u64(rate)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Burst, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(TextOrNumber)
    }
}

/// What an export serves, which decides the limits that it can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// A disk: operations, reads and writes.
    Disk,
    /// A network: packets, received (rx) and sent (tx) by the guest.
    Network,
}

impl LimitKind {
    /// Returns the name in messages.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Disk => "disks",
            Self::Network => "networks",
        }
    }

    /// Returns the kind that has a key. `None`: both have it.
    pub fn of(key: &str) -> Option<Self> {
        let has = |words: [&str; 3]| key.split('-').any(|word| words.contains(&word));
        match (has(["iops", "read", "write"]), has(["pps", "rx", "tx"])) {
            (true, _) => Some(Self::Disk),
            (_, true) => Some(Self::Network),
            _ => None,
        }
    }
}

/// Returns the key that limits the same for the other kind.
fn twin(key: &str) -> String {
    const TWINS: [(&str, &str); 3] = [("iops", "pps"), ("read", "rx"), ("write", "tx")];
    let other = |word| match TWINS.iter().find(|(one, two)| *one == word || *two == word) {
        Some((one, two)) if *one == word => *two,
        Some((one, _)) => *one,
        None => word,
    };
    key.split('-').map(other).collect::<Vec<_>>().join("-")
}

/// Limits of an export, or of a group of exports. A limit that is absent does not exist.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct LimitsSpec {
    /// Disks: operations per second: reads, writes, discards and write-zeroes. Flushes are not
    /// limited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Disks: reads per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_read: Option<u64>,
    /// Disks: writes, discards and write-zeroes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_write: Option<u64>,
    /// Networks: packets per second, received and sent by the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pps: Option<u64>,
    /// Networks: packets per second that the guest receives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pps_rx: Option<u64>,
    /// Networks: packets per second that the guest sends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pps_tx: Option<u64>,
    /// Bytes per second. Of a disk, discards count without bytes, and write-zeroes with the bytes
    /// that the storage may have to write. Of a network, frames count from their Ethernet header
    /// on, in both directions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps: Option<u64>,
    /// Disks: bytes read per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_read: Option<u64>,
    /// Disks: bytes written per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_write: Option<u64>,
    /// Networks: bytes per second that the guest receives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_rx: Option<u64>,
    /// Networks: bytes per second that the guest sends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_tx: Option<u64>,
    /// A burst of `iops`, for example `20000:10s`: 20000 per second for 10 seconds after a rest. In
    /// a file or QMP it is a string, or a number for a burst of one second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_iops: Option<Burst>,
    /// A burst of `iops-read`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_iops_read: Option<Burst>,
    /// A burst of `iops-write`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_iops_write: Option<Burst>,
    /// A burst of `pps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_pps: Option<Burst>,
    /// A burst of `pps-rx`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_pps_rx: Option<Burst>,
    /// A burst of `pps-tx`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_pps_tx: Option<Burst>,
    /// A burst of `bps`, for example `400M:10s`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_bps: Option<Burst>,
    /// A burst of `bps-read`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_bps_read: Option<Burst>,
    /// A burst of `bps-write`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_bps_write: Option<Burst>,
    /// A burst of `bps-rx`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_bps_rx: Option<Burst>,
    /// A burst of `bps-tx`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_bps_tx: Option<Burst>,
    /// Disks: a longer request counts as several operations of this number of bytes. Absent: each
    /// request is one operation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_size: Option<u64>,
    /// Networks: a longer frame counts as several packets of this number of bytes. Absent: each
    /// frame is one packet, also a frame of 64 KiB that is segmented later (TSO).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pps_size: Option<u64>,
    /// The name of a group, either of disks or of networks. Its members share the limits, which are
    /// those that one of them was given last. Absent: the export has its limits for itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl LimitsSpec {
    /// Returns the rates: name, rate, burst.
    pub fn rates(&self) -> [(&'static str, Option<u64>, Option<Burst>); 11] {
        [
            ("iops", self.iops, self.burst_iops),
            ("iops-read", self.iops_read, self.burst_iops_read),
            ("iops-write", self.iops_write, self.burst_iops_write),
            ("pps", self.pps, self.burst_pps),
            ("pps-rx", self.pps_rx, self.burst_pps_rx),
            ("pps-tx", self.pps_tx, self.burst_pps_tx),
            ("bps", self.bps, self.burst_bps),
            ("bps-read", self.bps_read, self.burst_bps_read),
            ("bps-write", self.bps_write, self.burst_bps_write),
            ("bps-rx", self.bps_rx, self.burst_bps_rx),
            ("bps-tx", self.bps_tx, self.burst_bps_tx),
        ]
    }

    /// Returns the sizes from which on a request counts several times: name, the rate to which it
    /// belongs, size.
    pub fn sizes(&self) -> [(&'static str, &'static str, Option<u64>); 2] {
        [("iops-size", "iops", self.iops_size), ("pps-size", "pps", self.pps_size)]
    }

    /// Returns whether it has no limit. It may have a group.
    pub fn is_empty(&self) -> bool {
        self.sizes().iter().all(|(.., size)| size.is_none())
            && self.rates().iter().all(|(_, rate, burst)| rate.is_none() && burst.is_none())
    }

    /// Checks the values, but not the name of the group.
    ///
    /// # Errors
    /// What is wrong, and the remedy.
    pub fn check(&self) -> Result<(), String> {
        if self.is_empty() && self.group.is_none() {
            return Err(
                "limits without a limit; give one, for example iops=5000, pps=100000 or bps=200M".into()
            );
        }
        for (key, rate, burst) in self.rates() {
            if let Some(rate) = rate {
                check_range(key, rate)?;
            }
            let Some(burst) = burst else { continue };
            let Some(rate) = rate else {
                return Err(format!("burst-{key}={burst} needs the rate after the burst; give {key} too"));
            };
            check_burst(key, rate, burst)?;
        }
        for (key, of, size) in self.sizes() {
            let Some(size) = size else { continue };
            check_range(key, size)?;
            if !self.rates().iter().any(|(rate, given, _)| rate.starts_with(of) && given.is_some()) {
                let what = if of == "pps" { "packets" } else { "operations" };
                return Err(format!("{key}={size} needs a limit of {what}; give {of} too"));
            }
        }
        Ok(())
    }

    /// Checks that all limits are of this kind.
    ///
    /// # Errors
    /// Which one is not, and the remedy.
    pub fn check_kind(&self, kind: LimitKind) -> Result<(), String> {
        let rates = self.rates().into_iter().filter(|(_, rate, burst)| rate.is_some() || burst.is_some());
        let sizes = self.sizes().into_iter().filter(|(.., size)| size.is_some());
        let mut given = rates.map(|(key, ..)| key).chain(sizes.map(|(key, ..)| key));
        match given.find_map(|key| Some((key, LimitKind::of(key).filter(|of| *of != kind)?))) {
            Some((key, of)) => Err(format!(
                "{key} is a limit of {}, and this export is one of {}; give {} instead",
                of.plural(),
                kind.plural(),
                twin(key)
            )),
            None => Ok(()),
        }
    }
}

fn check_range(key: &str, value: u64) -> Result<(), String> {
    match (1..=LIMIT_MAX).contains(&value) {
        true => Ok(()),
        false => Err(format!(
            "{key}={value} is out of range; 1 to {LIMIT_MAX} is possible, and a limit that is left out does not exist"
        )),
    }
}

fn check_burst(key: &str, rate: u64, burst: Burst) -> Result<(), String> {
    check_range(&format!("burst-{key}"), burst.rate)?;
    if burst.rate < rate {
        return Err(format!("burst-{key}={burst} is less than {key}={rate}; give at least as much"));
    }
    if burst.seconds == 0 || burst.rate.checked_mul(burst.seconds).is_none_or(|all| all > LIMIT_MAX) {
        return Err(format!(
            "burst-{key}={burst}: a burst lasts 1 second or longer, and its rate times its seconds is at most {LIMIT_MAX}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_are_read_and_written() {
        for (text, rate, seconds) in [
            ("20000:10s", 20_000, 10),
            ("5", 5, 1),
            ("200M:3", 200 << 20, 3),
            ("1k", 1024, 1),
            ("2P", 2 << 50, 1),
        ] {
            assert_eq!(text.parse(), Ok(Burst { rate, seconds }));
        }
        assert_eq!("5:1s".parse::<Burst>().unwrap().to_string(), "5");
        assert_eq!("1K:2".parse::<Burst>().unwrap().to_string(), "1024:2s");
        for text in
            ["", ":", "5:", ":5s", "-1", "5:-1s", "+5", "5:s", "1.5", "99999999999999999999", "9Q", "5:1m"]
        {
            assert!(text.parse::<Burst>().is_err(), "{text}");
        }
        assert!("99999999999999T".parse::<Burst>().unwrap_err().contains("too large"));
        for (json, good) in [("7", true), ("\"7:2s\"", true), ("-7", false), ("1.5", false), ("{}", false)] {
            assert_eq!(serde_json::from_str::<Burst>(json).is_ok(), good, "{json}");
        }
    }

    #[test]
    fn wrong_limits_are_refused_with_the_remedy() {
        let check = |json: serde_json::Value| serde_json::from_value::<LimitsSpec>(json).unwrap().check();
        let good = [
            serde_json::json!({ "iops": 1 }),
            serde_json::json!({ "iops": 5, "burst-iops": 5 }),
            serde_json::json!({ "bps": 1000, "burst-bps": "4000:10s", "iops-read": 3, "iops-size": 4096 }),
            serde_json::json!({ "group": "g" }),
            serde_json::json!({ "bps": LIMIT_MAX }),
            serde_json::json!({ "pps-rx": 5, "burst-pps-rx": "50:2s", "bps-tx": 7, "pps-size": 1514 }),
        ];
        good.into_iter().for_each(|json| check(json).unwrap());
        let bad = [
            (serde_json::json!({}), "without a limit"),
            (serde_json::json!({ "iops": 0 }), "out of range"),
            (serde_json::json!({ "bps-write": LIMIT_MAX + 1 }), "out of range"),
            (serde_json::json!({ "bps": u64::MAX }), "out of range"),
            (serde_json::json!({ "burst-iops": 5 }), "give iops too"),
            (serde_json::json!({ "iops": 5, "burst-iops": 4 }), "at least as much"),
            (serde_json::json!({ "iops": 5, "burst-iops": "5:0s" }), "1 second"),
            (serde_json::json!({ "iops": 5, "burst-iops": "5:18446744073709551615s" }), "at most"),
            (serde_json::json!({ "bps": 5, "iops-size": 4096 }), "give iops too"),
            (serde_json::json!({ "iops": 5, "iops-size": 0 }), "out of range"),
            (serde_json::json!({ "pps-tx": 0 }), "out of range"),
            (serde_json::json!({ "burst-pps-rx": 5 }), "give pps-rx too"),
            (serde_json::json!({ "iops": 5, "pps-size": 1500 }), "limit of packets; give pps too"),
        ];
        for (json, said) in bad {
            let why = check(json.clone()).unwrap_err();
            assert!(why.contains(said), "{json}: {why}");
        }
        assert!(serde_json::from_value::<LimitsSpec>(serde_json::json!({ "iops": -1 })).is_err());
    }

    #[test]
    fn limits_of_the_other_kind_are_refused_with_their_twins() {
        let check = |json: serde_json::Value, kind| {
            serde_json::from_value::<LimitsSpec>(json).unwrap().check_kind(kind)
        };
        let disk = serde_json::json!({ "iops": 1, "iops-read": 1, "bps-write": 1, "bps": 1, "iops-size": 1 });
        let net =
            serde_json::json!({ "pps": 1, "pps-tx": 1, "bps-rx": 1, "bps": 1, "pps-size": 1, "group": "g" });
        check(disk.clone(), LimitKind::Disk).unwrap();
        check(net.clone(), LimitKind::Network).unwrap();
        check(serde_json::json!({ "bps": 1, "group": "g" }), LimitKind::Network).unwrap();
        for (json, kind) in [(&disk, LimitKind::Disk), (&net, LimitKind::Network)] {
            let other = if kind == LimitKind::Disk { LimitKind::Network } else { LimitKind::Disk };
            for (key, value) in json.as_object().unwrap() {
                let limits = serde_json::json!({ key: value });
                match key.as_str() {
                    "bps" | "group" => check(limits, other).unwrap(),
                    key => {
                        let why = check(limits, other).unwrap_err();
                        assert!(why.starts_with(&format!("{key} is a limit of {}", kind.plural())), "{why}");
                        assert!(why.ends_with(&format!("give {} instead", twin(key))), "{why}");
                    }
                }
            }
        }
        assert_eq!(
            ["iops-read", "bps-tx", "pps", "pps-size"].map(twin),
            ["pps-rx", "bps-write", "iops", "iops-size"]
        );
    }
}
