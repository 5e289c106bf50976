//! `vshunt-bench`: command line, reports and comparison tables over the crate `vshunt-guest`.
//!
//! [`cli`] parses and runs. [`report`] shows a run of a disk, [`net_report`] one of a network
//! device. [`workers`] and [`kernel_table`] print the tables that started this project next to new
//! measurements, [`depth`] compares numbers of requests in flight, and [`tap`] measures taps alone.
//! [`plot`] draws tables.
//!
//! ```
//! assert_eq!(vshunt_bench::units::parse_size("4k"), Ok(4096));
//! ```

pub mod cli;
pub mod depth;
pub mod kernel_table;
pub mod net_report;
pub mod plot;
pub mod report;
mod server;
mod stop;
pub mod tap;
pub mod units;
pub mod workers;
