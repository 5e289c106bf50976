//! `vshunt top`: rates of exports, queues and workers, refreshed on a terminal.
//!
//! | module | contents |
//! | --- | --- |
//! | `sample` | what the daemon reports at one moment, and the thread that asks for it |
//! | `view` | rates: the difference of two samples, filtered and sorted |
//! | `state` | what the user selected and typed; what each key does |
//! | `draw` | the picture of a view and a state |
//! | `text` | the same tables for `--once` |
//!
//! Two threads: the sampler waits for the daemon, and the main thread for keys. So the keys work
//! while the daemon does not answer. A move of queues has a thread of its own, because it may take
//! as long as the requests in flight do.

mod draw;
mod sample;
mod state;
mod text;
mod view;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use serde_json::json;

use self::sample::{News, Sample, Sampler};
use self::state::{Action, State};
use self::view::View;
use super::args::{AttachArgs, TopArgs};
use super::attach::move_queues;
use super::call::connect;
use crate::outcome::{Failure, Outcome, print};
use crate::serve::signals;
use crate::values::QueueNames;

/// The wait for a key. After it the main thread looks for samples and signals.
const KEY_TIME: Duration = Duration::from_millis(50);
/// The time limit for the requests in flight of a queue that is moved by a key.
const MOVE_TIME: Duration = Duration::from_secs(10);

pub(super) fn run(control: Option<PathBuf>, args: &TopArgs) -> Outcome {
    if args.json || args.once {
        return lines(control, args);
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Failure::Usage(
            "top draws on a terminal, and stdin or stdout is none; give --once or --json".into(),
        ));
    }
    // A wrong socket is an error before the screen is cleared.
    connect(control.as_ref())?;
    let blocked = signals::block()?;
    let (stop, stopped) = mpsc::channel();
    signals::forward(blocked, stop)?;
    let (news, samples) = mpsc::channel();
    let sampler = Sampler { control: control.clone(), interval: args.interval };
    start("sampler", {
        let news = news.clone();
        move || sampler.run(&news)
    })?;
    let mut terminal =
        ratatui::try_init().map_err(|e| Failure::Failed(format!("cannot set up the terminal: {e}")))?;
    let mut screen = Screen { control, news, state: State::new(no_colour()), samples: Samples::default() };
    let ended =
        screen.run(&mut terminal, &samples, || !matches!(stopped.try_recv(), Err(TryRecvError::Empty)));
    ratatui::restore();
    ended.map_err(|e| Failure::Failed(format!("the terminal failed: {e}")))
}

/// Whether the user wants no colours: <https://no-color.org>, or a terminal without them.
fn no_colour() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
        || std::env::var_os("TERM").is_some_and(|t| t == "dumb")
}

fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Outcome {
    let started = thread::Builder::new().name(name.into()).spawn(run);
    started.map(drop).map_err(|e| Failure::Failed(format!("cannot start a thread: {e}")))
}

/// Prints the tables once, or a line of JSON for each interval.
fn lines(control: Option<PathBuf>, args: &TopArgs) -> Outcome {
    let mut client = connect(control.as_ref())?;
    let mut before = Sample::take(&mut client)?;
    loop {
        thread::sleep(args.interval);
        let now = Sample::take(&mut client)?;
        let view = View::between(&before, &now);
        match args.json {
            true => print(&format!("{}\n", json!(view)))?,
            false => print(&text::tables(&view))?,
        }
        if args.once {
            return Ok(());
        }
        before = now;
    }
}

/// The last two samples.
#[derive(Default)]
struct Samples {
    before: Option<Sample>,
    now: Option<Sample>,
}

/// The interactive program.
struct Screen {
    control: Option<PathBuf>,
    news: Sender<News>,
    state: State,
    samples: Samples,
}

impl Screen {
    /// Draws and handles keys until the user quits, or `stopped` is true.
    fn run(
        &mut self,
        terminal: &mut DefaultTerminal,
        news: &Receiver<News>,
        stopped: impl Fn() -> bool,
    ) -> io::Result<()> {
        let mut view = View::default();
        loop {
            terminal.draw(|frame| draw::draw(frame, &view, &mut self.state))?;
            let drawn = Instant::now();
            let mut changed = false;
            while !changed {
                if stopped() {
                    return Ok(());
                }
                if event::poll(KEY_TIME)? {
                    match event::read()? {
                        Event::Key(key) if key.kind != KeyEventKind::Release => {
                            match self.state.on_key(key, &view) {
                                Action::Quit => return Ok(()),
                                Action::Move { queues, worker } => self.start_move(queues, worker),
                                Action::Nothing => {}
                            }
                        }
                        _ => {}
                    }
                    changed = true;
                }
                for news in news.try_iter() {
                    self.take(news);
                    changed = true;
                }
                // Ages of messages are visible.
                changed |= drawn.elapsed() >= Duration::from_secs(1);
            }
            view = self.view();
        }
    }

    fn take(&mut self, news: News) {
        match news {
            News::Sample(sample) => {
                self.state.set_lost(None);
                if self.state.is_paused() {
                    return;
                }
                self.samples.before = self.samples.now.take();
                self.samples.now = Some(*sample);
                if let (Some(before), Some(now)) = (&self.samples.before, &self.samples.now) {
                    for text in view::moves(before, now).into_iter().chain(view::decisions(before, now)) {
                        self.state.say(text);
                    }
                }
            }
            // Rates across an interruption would be wrong.
            News::Lost(why) => {
                self.samples.before = None;
                self.state.set_lost(Some(why));
            }
            News::Said(text) => self.state.say(text),
        }
    }

    fn view(&mut self) -> View {
        let Some(now) = &self.samples.now else { return View::default() };
        let mut view = View::between(self.samples.before.as_ref().unwrap_or(now), now);
        self.state.arrange(&mut view);
        view
    }

    /// Moves queues on a thread of its own.
    fn start_move(&mut self, queues: QueueNames, worker: String) {
        let (control, news) = (self.control.clone(), self.news.clone());
        let run = move || {
            let args = AttachArgs { queues, worker, timeout: MOVE_TIME };
            let moved = connect(control.as_ref()).and_then(|mut client| move_queues(&mut client, args));
            let _ = news.send(News::Said(moved.unwrap_or_else(|e| e.to_string())));
        };
        if let Err(e) = start("move", run) {
            self.state.say(e.to_string());
        }
    }
}
