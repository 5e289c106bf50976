//! Flags of `vshunt config`.

use std::path::PathBuf;

use clap::Subcommand;

const CHECK_AFTER: &str = "\
Errors have the form FILE:LINE:COLUMN: MESSAGE, and all of them are shown. Files, folders, users and
groups that are missing on this machine are warnings. Exit status: 0 no errors, 2 errors.

Examples:
  vshunt config check /etc/vshunt/vm.toml";

const SHOW_AFTER: &str = "\
The file has the disks, networks, workers and exports as they are now, and the queues that are not
on the worker where they start. Paths are absolute. What a file cannot express is a comment in it:
descriptors that were passed to the daemon, jobs, dirty bitmaps, workers of the kernel, changed
workers of exports.

Examples:
  vshunt config show >vm.toml";

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a configuration file, without serving anything
    #[command(after_long_help = CHECK_AFTER)]
    Check {
        /// The file
        file: PathBuf,
    },
    /// Print what the daemon serves as a configuration file that starts the same again
    #[command(after_long_help = SHOW_AFTER)]
    Show,
}
