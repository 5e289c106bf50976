//! What the user selected and typed, and what each key does. No I/O.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::widgets::TableState;

use super::view::{Order, View};
use crate::values::QueueNames;

/// How long a message is shown.
const MESSAGE_TIME: Duration = Duration::from_secs(10);
/// Most characters of a filter or a worker's name.
const INPUT_MAX: usize = 64;

/// One of the three tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Focus {
    Exports,
    Queues,
    Workers,
}

/// What keys mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Keys are commands.
    Command,
    /// Keys change the filter.
    Filter,
    /// Keys change the name of the worker that `queues` move to.
    Move { queues: QueueNames, worker: String },
    /// The keys are listed.
    Help,
}

/// What the caller has to do after a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Nothing,
    Quit,
    /// Stop until `fg`.
    Suspend,
    /// Move these queues to this worker.
    Move {
        queues: QueueNames,
        worker: String,
    },
}

pub(super) struct State {
    pub(super) focus: Focus,
    pub(super) mode: Mode,
    pub(super) filter: String,
    pub(super) order: Order,
    pub(super) reverse: bool,
    pub(super) no_colour: bool,
    paused: bool,
    lost: Option<String>,
    messages: VecDeque<(Instant, String)>,
    /// The selected row of each table, in the order of [`Focus`].
    tables: [TableState; 3],
}

impl State {
    pub(super) fn new(no_colour: bool) -> Self {
        Self {
            focus: Focus::Queues,
            mode: Mode::Command,
            filter: String::new(),
            order: Order::default(),
            reverse: false,
            no_colour,
            paused: false,
            lost: None,
            messages: VecDeque::new(),
            tables: std::array::from_fn(|_| TableState::new()),
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Shows a message for a while.
    pub(super) fn say(&mut self, text: String) {
        self.messages.push_back((Instant::now(), text));
    }

    /// Records that the daemon does not answer, and why, or that it does.
    pub(super) fn set_lost(&mut self, why: Option<String>) {
        self.lost = why;
    }

    pub(super) fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Returns the newest message that is not too old.
    pub(super) fn message(&mut self) -> Option<&str> {
        self.messages.retain(|(at, _)| at.elapsed() < MESSAGE_TIME);
        self.messages.back().map(|(_, text)| text.as_str())
    }

    /// Filters and sorts a view, and keeps the selections within the tables.
    pub(super) fn arrange(&mut self, view: &mut View) {
        view.filter(&self.filter);
        view.sort(self.order, self.reverse);
        for (table, rows) in
            self.tables.iter_mut().zip([view.exports.len(), view.queues.len(), view.workers.len()])
        {
            let last = rows.checked_sub(1);
            table.select(last.map(|last| table.selected().unwrap_or(0).min(last)));
        }
    }

    pub(super) fn table(&mut self, which: Focus) -> &mut TableState {
        &mut self.tables[which as usize]
    }

    pub(super) fn on_key(&mut self, key: KeyEvent, view: &View) -> Action {
        if key.modifiers.contains(KeyModifiers::CONTROL) && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return Action::Quit;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('z') {
            return Action::Suspend;
        }
        match std::mem::replace(&mut self.mode, Mode::Command) {
            Mode::Command => return self.command(key.code, view),
            // Any key ends the help.
            Mode::Help => {}
            Mode::Filter => match key.code {
                KeyCode::Enter => {}
                KeyCode::Esc => self.filter.clear(),
                code => {
                    edit(&mut self.filter, code);
                    self.mode = Mode::Filter;
                }
            },
            Mode::Move { queues, mut worker } => match key.code {
                KeyCode::Enter if !worker.is_empty() => return Action::Move { queues, worker },
                KeyCode::Enter | KeyCode::Esc => {}
                code => {
                    edit(&mut worker, code);
                    self.mode = Mode::Move { queues, worker };
                }
            },
        }
        Action::Nothing
    }

    fn command(&mut self, code: KeyCode, view: &View) -> Action {
        match code {
            KeyCode::Char('q') => return Action::Quit,
            KeyCode::Esc if self.filter.is_empty() => return Action::Quit,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Tab => self.focus = self.focus.next(),
            KeyCode::BackTab => self.focus = self.focus.next().next(),
            KeyCode::Down | KeyCode::Char('j') => self.selected().select_next(),
            KeyCode::Up | KeyCode::Char('k') => self.selected().select_previous(),
            KeyCode::PageDown => self.selected().scroll_down_by(10),
            KeyCode::PageUp => self.selected().scroll_up_by(10),
            KeyCode::Home => self.selected().select_first(),
            KeyCode::End => self.selected().select_last(),
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char(' ') => self.paused = !self.paused,
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Char('?' | 'h') => self.mode = Mode::Help,
            KeyCode::Char('m') => self.begin_move(view),
            _ => {}
        }
        Action::Nothing
    }

    fn selected(&mut self) -> &mut TableState {
        let focus = self.focus;
        self.table(focus)
    }

    /// Asks for the worker to which the selected queue, or all queues of the selected export, move.
    fn begin_move(&mut self, view: &View) {
        let at = self.selected().selected();
        let queues = match (self.focus, at) {
            (Focus::Queues, Some(at)) => view
                .queues
                .get(at)
                .map(|q| QueueNames { export: q.export.clone(), indices: Some(q.index..=q.index) }),
            (Focus::Exports, Some(at)) => {
                view.exports.get(at).map(|e| QueueNames { export: e.name.clone(), indices: None })
            }
            _ => None,
        };
        match queues {
            Some(queues) => self.mode = Mode::Move { queues, worker: String::new() },
            None => self.say("select a queue or an export first (Tab, arrows)".into()),
        }
    }
}

impl Focus {
    fn next(self) -> Self {
        match self {
            Self::Exports => Self::Queues,
            Self::Queues => Self::Workers,
            Self::Workers => Self::Exports,
        }
    }
}

fn edit(text: &mut String, code: KeyCode) {
    match code {
        KeyCode::Char(c) if text.chars().count() < INPUT_MAX => text.push(c),
        KeyCode::Backspace => drop(text.pop()),
        _ => {}
    }
}

#[cfg(test)]
mod tests;
