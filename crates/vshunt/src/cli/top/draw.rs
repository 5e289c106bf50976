//! The picture of a view and a state: a line of totals, three tables, and a line of keys.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Clear, Paragraph, Row, Table};

use super::state::{Focus, Mode, State};
use super::text;
use super::view::{Rates, View, WorkerRow};
use crate::outcome::one_line;

/// Characters of the bar that shows the shares of a worker's time.
const BAR: usize = 10;

const KEYS: &str = "Tab table  ↑↓ select  m move  s sort  r reverse  / filter  space pause  ? help  q quit";

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
    frame.render_widget(Paragraph::new(totals(view, state)), title);
    let heights = heights(body.height, [view.exports.len(), view.queues.len(), view.workers.len()]);
    let [exports, queues, workers] = Layout::vertical(heights.map(Constraint::Length)).areas(body);
    let rows = view.exports.iter().map(text::export).map(|cells| cells.map(Text::from)).collect();
    table(frame, exports, Focus::Exports, text::EXPORTS, rows, state);
    let rows = view.queues.iter().map(text::queue).map(|cells| cells.map(Text::from)).collect();
    table(frame, queues, Focus::Queues, text::QUEUES, rows, state);
    let rows = view.workers.iter().map(|w| worker(w, state.no_colour)).collect();
    table(frame, workers, Focus::Workers, text::WORKERS, rows, state);
    frame.render_widget(Paragraph::new(last_line(state)), footer);
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

fn totals(view: &View, state: &State) -> Line<'static> {
    let mut all = Rates::default();
    view.exports.iter().for_each(|e| all.add(e.rates));
    let cpu: f64 = view.workers.iter().fold(0.0, |sum, w| sum + w.cpu_percent);
    let [requests, read, written, _] = text::rates(&all);
    let sort = format!("{}{}", state.order.word(), if state.reverse { ", reversed" } else { "" });
    let mut text = format!(
        "vshunt top: {requests} req/s, {read}/s read, {written}/s written, {cpu:.0} % CPU; by {sort}"
    );
    if !state.filter.is_empty() {
        text += &format!("; filter {}", one_line(&state.filter));
    }
    if state.is_paused() {
        text += "; paused";
    }
    Line::styled(text, Style::new().add_modifier(Modifier::BOLD))
}

fn last_line(state: &mut State) -> Line<'static> {
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
        None => Line::from(KEYS),
    }
}

/// Returns the cells of a worker, with a bar of its busy and its polling time.
fn worker(row: &WorkerRow, no_colour: bool) -> [Text<'static>; 10] {
    let mut cells = text::worker(row).map(Text::from);
    let up_to = |percent: f64| ((percent / 100.0 * BAR as f64).round() as usize).min(BAR);
    let busy = up_to(row.busy_percent);
    let polling = up_to(row.busy_percent + row.polling_percent) - busy;
    let colour = match row.hot || row.stalled {
        _ if no_colour => Style::new(),
        true => Style::new().fg(Color::Red),
        false => Style::new().fg(Color::Green),
    };
    let of_polling = if no_colour { Style::new() } else { Style::new().fg(Color::DarkGray) };
    let bold = Style::new().add_modifier(Modifier::BOLD);
    cells[text::BUSY] = Text::from(Line::from(vec![
        Span::styled("|".repeat(busy), colour),
        Span::styled(":".repeat(polling), of_polling),
        Span::raw(format!("{} {:>5.1}", ".".repeat(BAR - busy - polling), row.busy_percent)),
    ]));
    if row.hot || row.stalled {
        let note = &mut cells[text::NOTE];
        *note = std::mem::take(note).style(if no_colour { bold } else { colour.patch(bold) });
    }
    cells
}

fn table<const N: usize>(
    frame: &mut Frame<'_>,
    area: Rect,
    which: Focus,
    titles: [&str; N],
    rows: Vec<[Text<'static>; N]>,
    state: &mut State,
) {
    let focused = state.focus == which;
    let widths: [u16; N] = std::array::from_fn(|at| {
        let title = titles[at].trim_start_matches('>').len();
        let cells = rows.iter().map(|cells| cells[at].width());
        u16::try_from(cells.chain([title]).max().unwrap_or(0)).unwrap_or(u16::MAX)
    });
    let place = |text: Text<'static>, title: &str| match title.starts_with('>') {
        true => Cell::from(text.right_aligned()),
        false => Cell::from(text),
    };
    let head = titles.map(|title| place(Text::from(title.trim_start_matches('>').to_owned()), title));
    let head_style = match focused {
        true => Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED),
        false => Style::new().add_modifier(Modifier::DIM),
    };
    let rows = rows.into_iter().map(|cells| {
        let mut titles = titles.iter();
        Row::new(cells.map(|text| place(text, titles.next().unwrap_or(&""))))
    });
    let mut drawn = Table::new(rows, widths.map(Constraint::Length))
        .header(Row::new(head).style(head_style))
        .column_spacing(if area.width < 100 { 1 } else { 2 });
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
