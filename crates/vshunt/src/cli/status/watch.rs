//! `--watch`: prints a text again and again, on a terminal in one place.
//!
//! A thread asks the daemon and prints. The main thread waits for a signal, so that Ctrl-C ends the
//! program also while the daemon does not answer, and never in the middle of a text.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ratatui::crossterm::terminal;
use vshunt_types::sync::Locked;

use crate::outcome::{Failure, Outcome, print, printable};
use crate::serve::signals;

/// The wait for a signal. After it the main thread looks whether the other one has ended.
const SIGNAL_TIME: Duration = Duration::from_millis(50);

pub(super) fn run(interval: Duration, next: impl FnMut() -> Outcome<String> + Send + 'static) -> Outcome {
    let blocked = signals::block()?;
    let (stop, stopped) = mpsc::channel();
    signals::forward(blocked, stop, signals::Process::Command)?;
    // Held while a text is written.
    let writing = Arc::new(Mutex::new(()));
    let repeat = {
        let writing = writing.clone();
        move || repeat(interval, next, &writing)
    };
    let thread = thread::Builder::new().name("status".into()).spawn(repeat);
    let thread = thread.map_err(|e| Failure::Failed(format!("cannot start a thread: {e}")))?;
    while matches!(stopped.recv_timeout(SIGNAL_TIME), Err(RecvTimeoutError::Timeout)) {
        if thread.is_finished() {
            return thread.join().unwrap_or_else(|_| Err(Failure::Failed("a thread has failed".into())));
        }
    }
    let _writing = writing.locked();
    // The exit status follows here, with the lock held, so that no other text begins.
    std::process::exit(0)
}

/// Prints until it fails.
fn repeat(interval: Duration, mut next: impl FnMut() -> Outcome<String>, writing: &Mutex<()>) -> Outcome {
    let mut is_first = true;
    loop {
        let begin = Instant::now();
        let text = next()?;
        let written = writing.locked();
        match io::stdout().is_terminal() {
            true => draw(&text, is_first)?,
            false if is_first => print(&text)?,
            false => print(&format!("\n{text}"))?,
        }
        drop(written);
        is_first = false;
        thread::sleep(interval.saturating_sub(begin.elapsed()));
    }
}

/// Writes a text over the one before, from the top of the terminal.
fn draw(text: &str, is_first: bool) -> Outcome {
    // A terminal that does not know its size says 0.
    let known = terminal::size().ok().filter(|&(width, height)| width > 0 && height > 0);
    let (width, height) = known.unwrap_or((80, 24));
    let screen = screen(&printable(text), width.max(1).into(), height.max(2).into(), is_first);
    let mut out = io::stdout().lock();
    match out.write_all(screen.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(Failure::OutputClosed),
        Err(e) => Err(Failure::Failed(format!("cannot write to the terminal: {e}"))),
    }
}

/// Returns what shows a text on a terminal of this size. Lines that are too long are cut, and lines
/// that are too many are counted.
fn screen(text: &str, width: usize, height: usize, is_first: bool) -> String {
    // Clear the screen once, then only what changes, or the terminal flickers.
    let mut screen = String::from(if is_first { "\x1b[2J\x1b[H" } else { "\x1b[H" });
    let lines: Vec<&str> = text.lines().collect();
    // The cursor stays on the last line.
    let shown = if lines.len() < height { lines.len() } else { height - 2 };
    for line in &lines[..shown] {
        screen.extend(line.chars().take(width));
        screen.push_str("\x1b[K\n");
    }
    if shown < lines.len() {
        let more = format!("{} more lines; give a NAME, or a larger terminal", lines.len() - shown);
        screen.extend(more.chars().take(width));
        screen.push_str("\x1b[K\n");
    }
    screen.push_str("\x1b[J");
    screen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_to_the_terminal() {
        assert_eq!(screen("a\n\nb\n", 80, 4, true), "\x1b[2J\x1b[Ha\x1b[K\n\x1b[K\nb\x1b[K\n\x1b[J");
        let text = screen("abc\nd\ne\nf\n", 2, 4, false);
        assert_eq!(text, "\x1b[Hab\x1b[K\nd\x1b[K\n2 \x1b[K\n\x1b[J");
        assert_eq!(screen("", 1, 2, false), "\x1b[H\x1b[J");
        assert!(screen("a\nb\nc", 80, 2, false).contains("3 more lines"));
    }
}
