//! `vshunt top`: rates of exports, queues and workers, refreshed on a terminal.
//!
//! | module | contents |
//! | --- | --- |
//! | `sample` | what the daemon reports at one moment, and the thread that asks for it |
//! | `view` | rates: the difference of two samples, filtered and sorted |
//! | `state` | what the user selected and typed; what each key does |
//! | `draw` | the picture of a view and a state |
//! | `text` | the cells of the tables, and the tables for `--once` |
//! | `fit` | which cells are cut and which columns are left out on a narrow screen |
//!
//! Three threads: the sampler waits for the daemon, another one for keys, and the main thread for
//! what both send. So the keys work while the daemon does not answer, and the picture and signals
//! do while a key has arrived in part. A move of queues has a thread of its own, because it may
//! take as long as the requests in flight do.

mod draw;
mod fit;
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
use rustix::event::{PollFd, PollFlags, Timespec, poll};
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

/// The wait for news. After it the main thread looks for signals and for the end of the terminal.
const NEWS_TIME: Duration = Duration::from_millis(50);
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
    signals::forward(blocked, stop, signals::Process::Command)?;
    let (news, samples) = mpsc::channel();
    let sampler = Sampler { control: control.clone(), interval: args.interval };
    start("sampler", {
        let news = news.clone();
        move || sampler.run(&news)
    })?;
    let mut terminal =
        ratatui::try_init().map_err(|e| Failure::Failed(format!("cannot set up the terminal: {e}")))?;
    let keys = news.clone();
    start("keys", move || read_keys(&keys)).inspect_err(|_| ratatui::restore())?;
    let mut screen = Screen { control, news, state: State::new(no_colour()), samples: Samples::default() };
    let ended =
        screen.run(&mut terminal, &samples, || !matches!(stopped.try_recv(), Err(TryRecvError::Empty)));
    ratatui::restore();
    ended.map_err(|e| Failure::Failed(format!("the terminal failed: {e}")))
}

/// Passes on what the terminal sends, until there is nobody to pass it to. A key of which only the
/// first bytes have arrived holds this thread up until the rest comes.
fn read_keys(news: &Sender<News>) {
    loop {
        let (told, failed) = match event::read() {
            Ok(event) => (News::Terminal(event), false),
            Err(e) => (News::NoKeys(e), true),
        };
        if news.send(told).is_err() || failed {
            return;
        }
    }
}

/// Stops the program as ^Z does elsewhere, with the terminal as it was before, until `fg`.
fn suspend(terminal: &mut DefaultTerminal) -> io::Result<()> {
    ratatui::restore();
    // SAFETY: the call takes no memory.
    unsafe { libc::raise(libc::SIGSTOP) };
    // The whole picture is drawn again: the screen is empty, and so is what the new terminal takes
    // it to show.
    *terminal = ratatui::try_init()?;
    Ok(())
}

/// Whether the terminal that stdin is was closed.
fn is_hung_up() -> bool {
    let stdin = io::stdin();
    let mut fds = [PollFd::new(&stdin, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// Whether the user wants no colours: <https://no-color.org>, or a terminal without them.
fn no_colour() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
        || std::env::var_os("TERM").is_some_and(|t| t == "dumb")
}

/// Returns the characters of a line of the terminal that stdout is. None: stdout is none, or the
/// terminal does not tell.
fn terminal_width() -> Option<usize> {
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(&stdout).ok()?;
    Some(usize::from(size.ws_col)).filter(|width| *width > 0)
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
            false => print(&text::tables(&view, terminal_width()))?,
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
            loop {
                if stopped() || is_hung_up() {
                    return Ok(());
                }
                match news.recv_timeout(NEWS_TIME) {
                    // Ages of messages are visible.
                    Err(_) if drawn.elapsed() < Duration::from_secs(1) => continue,
                    Err(_) => {}
                    Ok(news) => match self.take(news, &view)? {
                        Action::Quit => return Ok(()),
                        Action::Suspend => suspend(terminal)?,
                        Action::Move { queues, worker } => self.start_move(queues, worker),
                        Action::Nothing => {}
                    },
                }
                break;
            }
            view = self.view();
        }
    }

    /// Handles news. Returns what the user wants. Keys are for what `view` shows.
    fn take(&mut self, news: News, view: &View) -> io::Result<Action> {
        match news {
            News::Sample(sample) => {
                self.state.set_lost(None);
                if self.state.is_paused() {
                    return Ok(Action::Nothing);
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
            News::Terminal(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                return Ok(self.state.on_key(key, view));
            }
            News::Terminal(_) => {}
            News::NoKeys(e) => return Err(e),
        }
        Ok(Action::Nothing)
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
