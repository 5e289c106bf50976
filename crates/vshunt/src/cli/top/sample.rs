//! What the daemon reports at one moment.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::Event;
use serde_json::json;
use vshunt_types::spec::{ExportInfo, QueueInfo, WorkerInfo};

use super::super::call::{call, connect, narrowed, started};
use super::super::client::Client;
use crate::outcome::Outcome;

/// The counters of a daemon, and when they were read.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) exports: Vec<ExportInfo>,
    /// The queues that a guest has started.
    pub(super) queues: Vec<QueueInfo>,
    pub(super) workers: Vec<WorkerInfo>,
}

impl Sample {
    /// Asks the daemon.
    pub(super) fn take(client: &mut Client) -> Outcome<Self> {
        let exports = started(client, "query-exports")?;
        let queues = narrowed(client, "query-queues", json!({ "started-only": true, "histograms": true }))?;
        Ok(Self { at: Instant::now(), exports, queues, workers: call(client, "query-workers", json!({}))? })
    }
}

/// What other threads tell the main thread.
pub(super) enum News {
    Sample(Box<Sample>),
    /// The daemon does not answer, for this reason.
    Lost(String),
    /// Something to show to the user.
    Said(String),
    /// A key, or another size.
    Terminal(Event),
    /// The terminal cannot be read any more.
    NoKeys(io::Error),
}

/// Takes samples until the program ends.
pub(super) struct Sampler {
    pub(super) control: Option<PathBuf>,
    pub(super) interval: Duration,
}

impl Sampler {
    /// Sends samples, and connects again after the daemon was restarted. Returns once the receiver
    /// is gone.
    pub(super) fn run(&self, news: &Sender<News>) {
        loop {
            let Err(why) = self.session(news) else { return };
            if news.send(News::Lost(why)).is_err() {
                return;
            }
            thread::sleep(self.interval);
        }
    }

    /// Samples over one connection. `Ok`: the receiver is gone. The error is why the daemon does
    /// not answer.
    fn session(&self, news: &Sender<News>) -> Result<(), String> {
        let mut client = connect(self.control.as_ref()).map_err(|e| e.to_string())?;
        loop {
            let begin = Instant::now();
            let sample = Sample::take(&mut client).map_err(|e| e.to_string())?;
            if news.send(News::Sample(Box::new(sample))).is_err() {
                return Ok(());
            }
            thread::sleep(self.interval.saturating_sub(begin.elapsed()));
        }
    }
}
