//! `vshunt image map`.

use super::args::{MapArgs, Output};
use super::chain::{self, Chain, Part};
use crate::outcome::{Failure, Outcome, one_line, print};

/// Bytes of output that are collected before they are printed.
const OUT_BYTES: usize = 64 << 10;

pub(super) fn run(args: &MapArgs) -> Outcome {
    let layers = chain::open(&args.file, args.format, args.force_share)?;
    let mut chain = Chain::new(&layers, None)?;
    let start = args.start_offset.unwrap_or(0);
    let end = args.max_length.map_or(u64::MAX, |len| start.saturating_add(len)).min(chain.size());
    let mut out = Table::new(args.output);
    let (mut at, mut last): (u64, Option<Part>) = (start, None);
    while at < end {
        let next = chain.at(at, end)?;
        at += next.len;
        match &mut last {
            Some(part) if part.joins(&next) => part.len += next.len,
            _ => {
                if let Some(part) = last.replace(next) {
                    out.add(&chain, &part)?;
                }
            }
        }
    }
    if let Some(part) = last {
        out.add(&chain, &part)?;
    }
    out.end()
}

/// The output. It is printed while the map is read, since it may be long.
struct Table {
    form: Output,
    text: String,
    empty: bool,
}

impl Table {
    fn new(form: Output) -> Self {
        let text = match form {
            Output::Human => format!("{:<16}{:<16}{:<16}File\n", "Offset", "Length", "Mapped to"),
            Output::Json => "[".to_owned(),
        };
        Self { form, text, empty: true }
    }

    fn add(&mut self, chain: &Chain<'_>, part: &Part) -> Outcome {
        match self.form {
            Output::Human => self.text.push_str(&human(chain, part)?),
            Output::Json => {
                self.text.push_str(if self.empty { "" } else { ",\n" });
                self.text.push_str(&json(part));
            }
        }
        self.empty = false;
        if self.text.len() > OUT_BYTES { print(&std::mem::take(&mut self.text)) } else { Ok(()) }
    }

    fn end(mut self) -> Outcome {
        if self.form == Output::Json {
            self.text.push_str("]\n");
        }
        print(&self.text)
    }
}

/// Returns the line for data that a file has. Other parts have none.
fn human(chain: &Chain<'_>, part: &Part) -> Outcome<String> {
    if !part.data || part.zero {
        return Ok(String::new());
    }
    let file = chain.file(part).display().to_string();
    let file = one_line(&file);
    let Some(at) = part.offset else {
        return Err(Failure::Failed(format!(
            "{file} has compressed clusters, at offset {:#x} of the disk; --output=json shows them",
            part.start
        )));
    };
    let hex = |n: u64| if n == 0 { "0".to_owned() } else { format!("{n:#x}") };
    Ok(format!("{:<16}{:<16}{:<16}{file}\n", hex(part.start), hex(part.len), hex(at)))
}

/// Returns the object of QEMU's MapEntry, in the order and with the spaces of qemu-img.
fn json(part: &Part) -> String {
    let offset = part.offset.map_or(String::new(), |at| format!(", \"offset\": {at}"));
    format!(
        "{{ \"start\": {}, \"length\": {}, \"depth\": {}, \"present\": {}, \"zero\": {}, \"data\": {}, \
         \"compressed\": {}{offset}}}",
        part.start, part.len, part.depth, part.present, part.zero, part.data, part.compressed
    )
}
