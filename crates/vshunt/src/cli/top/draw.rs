//! The picture of a view and a state: a line of totals, three tables, and a line of keys.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Clear, Paragraph, Row, Table};

use super::fit::{Columns, Cut, cut};
use super::state::{Focus, Mode, State};
use super::text;
use super::view::{Rates, View, WorkerRow};
use crate::outcome::one_line;

/// Characters of the bar that shows the shares of a worker's time.
const BAR: usize = 10;

/// The keys that the last line shows as far as they fit; the last two always.
const KEYS: [&str; 8] =
    ["Tab table", "↑↓ row", "m move", "s, r sort", "/ filter", "space pause", "? help", "q quit"];

/// Characters of the filter that the first line shows.
const FILTER: usize = 24;

const HELP: &str = "\
Tab, Shift-Tab     next, previous table
arrows, j k        select a row; PgUp, PgDn, Home, End
m                  move the selected queue, or all queues of the
                   selected export, to a worker (id or name)
s, r               sort by name, requests or bytes; reverse
/                  show only names that contain a text; Esc: all
space              pause
q, Esc, Ctrl-C     quit

Any key closes this.";

pub(super) fn draw(frame: &mut Frame<'_>, view: &View, state: &mut State) {
    let [title, body, footer] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());
    frame.render_widget(Paragraph::new(totals(view, state, title.width)), title);
    let heights = heights(body.height, [view.exports.len(), view.queues.len(), view.workers.len()]);
    let [exports, queues, workers] = Layout::vertical(heights.map(Constraint::Length)).areas(body);
    let rows = view.exports.iter().map(text::export).collect();
    table(frame, exports, Focus::Exports, &text::EXPORTS, rows, state, |_, _| {});
    let rows = view.queues.iter().map(text::queue).collect();
    table(frame, queues, Focus::Queues, &text::QUEUES, rows, state, |_, _| {});
    let rows = view.workers.iter().map(worker).collect();
    let no_colour = state.no_colour;
    table(frame, workers, Focus::Workers, &text::WORKERS, rows, state, |at, cells| {
        colour(&view.workers[at], cells, no_colour);
    });
    frame.render_widget(Paragraph::new(last_line(state, footer.width)), footer);
    if state.mode == Mode::Help {
        let area = centred(frame.area(), HELP);
        frame.render_widget(Clear, area);
        frame.render_widget(Paragraph::new(HELP).style(Style::new().add_modifier(Modifier::REVERSED)), area);
    }
}

/// Distributes lines among the tables of so many rows. Each has a line of titles. If they do not
/// fit, exports get a quarter, workers a third, and queues the rest.
fn heights(lines: u16, rows: [usize; 3]) -> [u16; 3] {
    let wanted = rows.map(|n| u16::try_from(n + 2).unwrap_or(u16::MAX));
    let total: u32 = wanted.iter().map(|n| u32::from(*n)).sum();
    if total <= u32::from(lines) {
        return [wanted[0], wanted[1], lines - wanted[0] - wanted[1]];
    }
    let exports = wanted[0].min((lines / 4).max(2));
    let workers = wanted[2].min((lines / 3).max(2)).min(lines.saturating_sub(exports));
    // Queues may need less than the rest.
    let queues = wanted[1].min(lines.saturating_sub(exports + workers));
    [lines.saturating_sub(queues + workers), queues, workers]
}

/// The first line. What the user has set comes first, and is there if the totals do not fit.
fn totals(view: &View, state: &State, width: u16) -> Line<'static> {
    let mut all = Rates::default();
    view.exports.iter().for_each(|e| all.add(e.rates));
    let cpu: f64 = view.workers.iter().fold(0.0, |sum, w| sum + w.cpu_percent);
    let [requests, read, written, _] = text::rates(&all);
    let mut text = "vshunt top: ".to_owned();
    if state.is_paused() {
        text += "paused; ";
    }
    if !state.filter.is_empty() {
        text += &format!("filter {}; ", cut(&one_line(&state.filter), FILTER, Cut::End));
    }
    text += &format!("by {}{}; ", state.order.word(), if state.reverse { ", reversed" } else { "" });
    text += &format!("{requests} req/s, {read}/s read, {written}/s written, {cpu:.0} % CPU");
    Line::styled(cut(&text, width.into(), Cut::End), Style::new().add_modifier(Modifier::BOLD))
}

/// The keys that fit into a line.
fn keys(width: u16) -> String {
    let (mut first, always) = KEYS.split_at(KEYS.len() - 2);
    loop {
        let text = [first, always].concat().join("  ");
        match first.split_last() {
            Some((_, rest)) if text.chars().count() > usize::from(width) => first = rest,
            _ => return text,
        }
    }
}

fn last_line(state: &mut State, width: u16) -> Line<'static> {
    let alarm =
        if state.no_colour { Style::new().add_modifier(Modifier::BOLD) } else { Style::new().fg(Color::Red) };
    match &state.mode {
        Mode::Filter => return Line::from(format!("filter: {}_", one_line(&state.filter))),
        Mode::Move { queues, worker } => {
            return Line::from(format!("move {queues} to worker (id or name): {}_", one_line(worker)));
        }
        Mode::Command | Mode::Help => {}
    }
    if let Some(why) = state.lost() {
        return Line::styled(format!("trying again: {}", one_line(why)), alarm);
    }
    match state.message() {
        Some(text) => Line::from(one_line(text).into_owned()),
        None => Line::from(keys(width)),
    }
}

/// Returns the characters of the bar that show a worker's busy and its polling time.
fn shares(row: &WorkerRow) -> (usize, usize) {
    let up_to = |percent: f64| ((percent / 100.0 * BAR as f64).round() as usize).min(BAR);
    let busy = up_to(row.busy_percent);
    (busy, up_to(row.busy_percent + row.polling_percent) - busy)
}

/// Returns the cells of a worker, with a bar of its busy and its polling time.
fn worker(row: &WorkerRow) -> [String; 10] {
    let mut cells = text::worker(row);
    let (busy, polling) = shares(row);
    let idle = BAR - busy - polling;
    let bar = ["|".repeat(busy), ":".repeat(polling), ".".repeat(idle)].concat();
    cells[text::BUSY] = format!("{bar} {:>5.1}", row.busy_percent);
    cells
}

/// Colours the bar and the note of a worker.
fn colour(row: &WorkerRow, cells: &mut [Text<'static>; 10], no_colour: bool) {
    let (busy, polling) = shares(row);
    let colour = match row.hot || row.stalled {
        _ if no_colour => Style::new(),
        true => Style::new().fg(Color::Red),
        false => Style::new().fg(Color::Green),
    };
    let of_polling = if no_colour { Style::new() } else { Style::new().fg(Color::DarkGray) };
    let mut bar = cells[text::BUSY].to_string();
    // The characters of the bar have one byte each.
    let rest = bar.split_off(busy + polling);
    let of_polls = bar.split_off(busy);
    cells[text::BUSY] = Text::from(Line::from(vec![
        Span::styled(bar, colour),
        Span::styled(of_polls, of_polling),
        Span::raw(rest),
    ]));
    if row.hot || row.stalled {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let note = &mut cells[text::NOTE];
        *note = std::mem::take(note).style(if no_colour { bold } else { colour.patch(bold) });
    }
}

/// Draws a table. `decorate` gets the number of a row and its cells.
fn table<const N: usize>(
    frame: &mut Frame<'_>,
    area: Rect,
    which: Focus,
    columns: &Columns<N>,
    mut rows: Vec<[String; N]>,
    state: &mut State,
    decorate: impl Fn(usize, &mut [Text<'static>; N]),
) {
    let focused = state.focus == which;
    let gap = if area.width < 100 { 1 } else { 2 };
    rows.iter_mut().flatten().for_each(|cell| *cell = one_line(cell).into_owned());
    let widths = columns.fit(&mut rows, gap.into(), area.width.into());
    let place = |text: Text<'static>, title: &str| match title.starts_with('>') {
        true => Cell::from(text.right_aligned()),
        false => Cell::from(text),
    };
    let line = |cells: [Text<'static>; N]| {
        let shown = cells.into_iter().zip(columns.titles).zip(widths).filter(|(_, width)| *width > 0);
        Row::new(shown.map(|((text, title), _)| place(text, title)))
    };
    let head = line(columns.titles.map(|title| Text::from(title.trim_start_matches('>'))));
    let head_style = match focused {
        true => Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED),
        false => Style::new().add_modifier(Modifier::DIM),
    };
    let rows = rows.into_iter().enumerate().map(|(at, cells)| {
        let mut cells = cells.map(Text::from);
        decorate(at, &mut cells);
        line(cells)
    });
    let lengths = widths.into_iter().filter(|width| *width > 0);
    let lengths = lengths.map(|width| Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX)));
    let mut drawn = Table::new(rows, lengths).header(head.style(head_style)).column_spacing(gap);
    if focused {
        drawn = drawn.row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    }
    frame.render_stateful_widget(drawn, area, state.table(which));
}

/// Returns the middle of an area, as large as the text.
fn centred(area: Rect, text: &str) -> Rect {
    let width = text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    let width = u16::try_from(width).unwrap_or(u16::MAX).min(area.width);
    let height = u16::try_from(text.lines().count()).unwrap_or(u16::MAX).min(area.height);
    Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height }
}

#[cfg(test)]
mod tests;
