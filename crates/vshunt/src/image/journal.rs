//! The map journal of an image that was not closed, for `info` and `check`.

use std::path::PathBuf;

use serde_json::{Value, json};
use vshunt_block::JournalView;

/// The journal of a qcow2 image that its last writer, a vshunt, did not close.
pub(super) struct MapJournal {
    /// Its file, if the image was written with one. The file may be missing; see `state`.
    pub(super) path: Option<PathBuf>,
    /// The state of the journal. Never [`JournalView::Complete`].
    pub(super) state: JournalView,
}

impl MapJournal {
    /// Returns the name of the state: `pending`, `in-use` or `lost`.
    fn word(&self) -> &'static str {
        match self.state {
            JournalView::Complete | JournalView::Changes(_) => "pending",
            JournalView::InUse => "in-use",
            JournalView::Lost(_) => "lost",
        }
    }

    /// Returns the description for `--output=human`.
    pub(super) fn text(&self) -> String {
        let path = self.path.as_ref().map_or_else(|| "none".to_owned(), |path| path.display().to_string());
        match &self.state {
            JournalView::Complete => path,
            JournalView::Changes(changes) if changes.count() == 0 => {
                format!("{path}: no change is missing in the image")
            }
            JournalView::Changes(changes) => {
                format!("{path}: {} changes that are not in the image yet", changes.count())
            }
            JournalView::InUse => format!("{path}: in use by a running vshunt"),
            JournalView::Lost(why) => format!("{path}: not usable: the image {why}"),
        }
    }

    /// Returns the description for `--output=json`.
    pub(super) fn json(&self) -> Value {
        let mut value = json!({ "state": self.word() });
        if let Some(path) = &self.path {
            value["filename"] = json!(path.display().to_string());
        }
        match &self.state {
            JournalView::Changes(changes) => value["changes"] = json!(changes.count()),
            JournalView::Lost(why) => value["why"] = json!(format!("the image {why}")),
            JournalView::Complete | JournalView::InUse => {}
        }
        value
    }
}
