//! What is wrong with a configuration, as messages of which there are not too many.

use crate::outcome::{Failure, Outcome};

/// Messages at most. A file can have a hundred thousand sections that are all wrong.
pub(super) const MESSAGES_MAX: usize = 100;

/// All that is wrong, as messages. Those beyond [`MESSAGES_MAX`] are counted.
#[derive(Debug, Default)]
pub(super) struct Told {
    told: Vec<String>,
    more: usize,
}

impl Told {
    /// Adds a message. `why` runs only if there is room.
    pub(super) fn tell(&mut self, why: impl FnOnce() -> String) {
        if self.told.len() < MESSAGES_MAX {
            self.told.push(why());
        } else {
            self.more += 1;
        }
    }

    /// Returns whether nothing is wrong.
    ///
    /// # Errors
    /// Usage: something is. Each message is a line, and the last one may count others.
    pub(super) fn end(self) -> Outcome {
        match self.lines() {
            lines if lines.is_empty() => Ok(()),
            mut lines => {
                lines.iter_mut().skip(1).for_each(|line| line.insert_str(0, "vshunt: "));
                Err(Failure::Lines(Failure::Usage(String::new()).code(), lines))
            }
        }
    }

    /// Returns the messages. The last one may count others.
    pub(super) fn lines(mut self) -> Vec<String> {
        if self.more > 0 {
            self.told.push(format!("and {} more errors", self.more));
        }
        self.told
    }
}
