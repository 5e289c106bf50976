//! `vshunt image …`: images that nobody uses, under the names that users of qemu-img know.
//!
//! All of it runs in this process, without a daemon; the image is locked meanwhile as QEMU locks it.

mod args;
mod check;
mod create;
mod file;
mod info;
mod progress;
mod units;

use std::path::Path;

use super::{Failure, Outcome};

use args::ImageCommand;
pub(crate) use args::{AFTER, ImageArgs};

/// Formats that these commands know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImageFormat {
    Raw,
    Qcow2,
}

pub(crate) fn run(command: ImageCommand, quiet: bool) -> Outcome {
    match command {
        ImageCommand::Create(args) => create::run(*args, quiet),
        ImageCommand::Info(args) => info::run(&args),
        ImageCommand::Check(args) => check::run(&args, quiet),
    }
}

/// What failed with which image, and what helps.
fn failed(path: &Path, e: &qcow2::Error) -> Failure {
    let path = path.display();
    Failure::Failed(match e {
        qcow2::Error::Corrupt(_) => {
            format!("{path}: {e}; `vshunt image check -r all {path}` repairs what can be repaired")
        }
        _ => format!("{path}: {e}"),
    })
}
