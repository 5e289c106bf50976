//! A strict reader of OpenMetrics 1.0 text: what the specification's grammar and its rules on
//! names, units and order do not allow is a failure of the test.

use std::collections::{BTreeMap, BTreeSet};

/// Name and labels in their order, as a scraper tells series apart.
pub(crate) type Series = (String, BTreeMap<String, String>);

/// All series of one scrape.
pub(crate) struct Scrape {
    values: BTreeMap<Series, f64>,
}

impl Scrape {
    pub(crate) fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        self.values.get(&(name.to_owned(), labels)).copied()
    }

    /// Those whose name begins so.
    pub(crate) fn series(&self, prefix: &str) -> BTreeSet<Series> {
        self.values.keys().filter(|(name, _)| name.starts_with(prefix)).cloned().collect()
    }

    /// The values that a label has anywhere.
    pub(crate) fn labels(&self, name: &str, label: &str) -> BTreeSet<String> {
        self.values.keys().filter(|(n, _)| n == name).filter_map(|(_, l)| l.get(label).cloned()).collect()
    }
}

/// What is said of a metric before its samples.
#[derive(Default)]
struct Family {
    name: String,
    kind: String,
    unit: bool,
    help: bool,
}

/// Reads all of it.
pub(crate) fn parse(text: &str) -> Scrape {
    let body = text.strip_suffix("# EOF\n").expect("the text ends with # EOF");
    let mut family: Option<Family> = None;
    let mut seen = BTreeSet::new();
    let mut values = BTreeMap::new();
    for line in body.split_terminator('\n') {
        assert!(!line.is_empty() && !line.ends_with('\r'), "{line:?}");
        match line.strip_prefix("# ") {
            Some(said) => describe(said, &mut family, &mut seen),
            None => {
                let family = family.as_ref().expect("a sample stands below its TYPE");
                let (series, value) = sample(line);
                check(family, &series, value);
                assert!(values.insert(series, value).is_none(), "twice: {line}");
            }
        }
    }
    check_histograms(&values);
    Scrape { values }
}

/// The buckets of a histogram are cumulative, and the last one has all.
fn check_histograms(values: &BTreeMap<Series, f64>) {
    let mut histograms: BTreeMap<Series, Vec<(f64, f64)>> = BTreeMap::new();
    for ((name, labels), value) in values.iter().filter(|((name, _), _)| name.ends_with("_bucket")) {
        let mut labels = labels.clone();
        let le = labels.remove("le").unwrap_or_else(|| panic!("{name} without le"));
        let name = name.trim_end_matches("_bucket").to_owned();
        histograms.entry((name, labels)).or_default().push((le.parse().unwrap(), *value));
    }
    for ((name, labels), mut buckets) in histograms {
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(buckets.windows(2).all(|two| two[0].1 <= two[1].1), "{name} {labels:?} {buckets:?}");
        let count = values.get(&(format!("{name}_count"), labels.clone()));
        assert_eq!(buckets.last(), count.map(|count| (f64::INFINITY, *count)).as_ref(), "{name}");
        assert!(values.contains_key(&(format!("{name}_sum"), labels)), "{name} has no sum");
    }
}

fn is_name(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.chars().all(good) && text.starts_with(|c: char| !c.is_ascii_digit())
}

fn describe(said: &str, family: &mut Option<Family>, seen: &mut BTreeSet<String>) {
    let mut parts = said.splitn(3, ' ');
    let (what, name, rest) = (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap());
    assert!(is_name(name), "{said}");
    if family.as_ref().is_none_or(|f| f.name != name) {
        assert!(seen.insert(name.to_owned()), "the samples of {name} do not stand together");
        *family = Some(Family { name: name.to_owned(), ..Family::default() });
    }
    let family = family.as_mut().unwrap();
    match what {
        "HELP" => assert!(!std::mem::replace(&mut family.help, true) && !rest.is_empty(), "{said}"),
        "TYPE" => {
            assert!(["counter", "gauge", "histogram"].contains(&rest), "{said}");
            assert!(std::mem::replace(&mut family.kind, rest.to_owned()).is_empty(), "{said}");
        }
        "UNIT" => {
            assert!(!std::mem::replace(&mut family.unit, true), "{said}");
            assert!(["bytes", "seconds"].contains(&rest) && name.ends_with(&format!("_{rest}")), "{said}");
        }
        _ => panic!("{said}"),
    }
}

/// `name{label="value",…} number`.
fn sample(line: &str) -> (Series, f64) {
    let end = line.find(['{', ' ']).unwrap_or_else(|| panic!("{line}"));
    let (name, mut rest) = line.split_at(end);
    assert!(is_name(name), "{line}");
    let mut labels = BTreeMap::new();
    if let Some(mut inner) = rest.strip_prefix('{') {
        loop {
            let (key, after) = inner.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
            assert!(is_name(key), "{line}");
            let (value, after) = quoted(after);
            assert!(labels.insert(key.to_owned(), value).is_none(), "{line}");
            inner = match after.strip_prefix(',') {
                Some(after) => after,
                None => {
                    rest = after.strip_prefix('}').unwrap_or_else(|| panic!("{line}"));
                    break;
                }
            };
        }
    }
    let number = rest.strip_prefix(' ').unwrap_or_else(|| panic!("{line}"));
    assert!(number.chars().all(|c| c.is_ascii_digit() || ".e-".contains(c)), "{line}");
    ((name.to_owned(), labels), number.parse().unwrap_or_else(|_| panic!("{line}")))
}

/// What is up to the closing quote, and what is behind it.
fn quoted(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.push(match chars.next() {
                Some((_, 'n')) => '\n',
                Some((_, c @ ('"' | '\\'))) => c,
                other => panic!("\\{other:?} in {text}"),
            }),
            c => value.push(c),
        }
    }
    panic!("no end of {text}");
}

fn check(family: &Family, (name, _): &Series, value: f64) {
    assert!(family.help && !family.kind.is_empty(), "{name} has no HELP or no TYPE");
    let suffix = name.strip_prefix(&family.name).unwrap_or_else(|| panic!("{name} below {}", family.name));
    let allowed: &[&str] = match family.kind.as_str() {
        "counter" => &["_total"],
        "histogram" => &["_bucket", "_count", "_sum"],
        _ => &[""],
    };
    assert!(allowed.contains(&suffix), "{name}");
    assert!(value >= 0.0 && (!name.ends_with("_info") || value == 1.0), "{name} {value}");
    for unit in ["bytes", "seconds"] {
        assert_eq!(
            family.name.ends_with(&format!("_{unit}")),
            family.unit && family.name.ends_with(unit),
            "{name}"
        );
    }
}

#[test]
fn it_is_strict() {
    let good = "# HELP a_bytes x\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total{l=\"\\\"\\n,}\"} 1.5\n# EOF\n";
    assert_eq!(parse(good).value("a_bytes_total", &[("l", "\"\n,}")]), Some(1.5));
    let gauge = "# HELP a x\n# TYPE a gauge\n";
    for (bad, why) in [
        (format!("{gauge}a 1\n"), "no end"),
        (format!("{gauge}a 1\na 1\n# EOF\n"), "one twice"),
        (format!("{gauge}b 1\n# EOF\n"), "another name"),
        (format!("{gauge}a{{l=\"x}} 1\n# EOF\n"), "no closing quote"),
        (format!("{gauge}a{{}} 1\n# EOF\n"), "no label"),
        (format!("{gauge}a -1\n# EOF\n"), "less than nothing"),
        (format!("{gauge}a NaN\n# EOF\n"), "no number"),
        (format!("{gauge}\na 1\n# EOF\n"), "an empty line"),
        ("# TYPE a gauge\na 1\n# EOF\n".to_owned(), "no help"),
        ("# HELP a x\n# TYPE a counter\na 1\n# EOF\n".to_owned(), "a counter without _total"),
        ("# HELP a_bytes x\n# TYPE a_bytes gauge\na_bytes 1\n# EOF\n".to_owned(), "no unit"),
        (
            "# HELP a x\n# TYPE a histogram\na_sum 1\na_count 1\na_bucket{le=\"+Inf\"} 2\n# EOF\n".to_owned(),
            "a count that is not the last bucket",
        ),
        (format!("{gauge}a 1\n# HELP b x\n# TYPE b gauge\nb 1\n{gauge}a 2\n# EOF\n"), "in two places"),
    ] {
        assert!(std::panic::catch_unwind(|| parse(&bad)).is_err(), "{why} is taken: {bad}");
    }
}
