//! Fits a table to the width of a screen.
//!
//! Numbers, bars and most names keep their width. Lists and long names are cut, and columns that
//! matter least are left out.

use super::super::show::{aligned, widths};
use crate::outcome::one_line;

/// Where a text that is too long is cut. An ellipsis stands there.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cut {
    End,
    /// Names often differ at their ends only, such as those of queues.
    Middle,
}

/// The columns of a table.
pub(super) struct Columns<const N: usize> {
    /// `>`: aligned to the right.
    pub(super) titles: [&'static str; N],
    /// The columns that may be cut, in this order, and the characters that are kept. Columns are
    /// left out before one has fewer.
    pub(super) cut: &'static [(usize, Cut, usize)],
    /// The columns that are left out, in this order, and after them any, from the last one on. The
    /// first column stays.
    pub(super) left_out: &'static [usize],
}

/// The width that tables have where the screen's is not known, if nothing has to be cut for it.
const USUAL_WIDTH: usize = 80;

impl<const N: usize> Columns<N> {
    /// Cuts the cells so that a line with `gap` spaces between columns has at most `room`
    /// characters. Returns the width of each column, 0 for those that are left out.
    pub(super) fn fit(&self, rows: &mut [[String; N]], gap: usize, room: usize) -> [usize; N] {
        let mut widths = widths(self.titles, rows);
        let mut least = widths;
        for &(at, _, kept) in self.cut {
            least[at] = least[at].min(kept);
        }
        for at in self.left_out.iter().copied().chain((1..N).rev()) {
            if line(&least, gap) <= room {
                break;
            }
            (least[at], widths[at]) = (0, 0);
        }
        least[0] = least[0].min(room);
        for &(at, place, _) in self.cut {
            let excess = line(&widths, gap).saturating_sub(room);
            let width = widths[at].saturating_sub(excess).max(least[at]);
            if width < widths[at] {
                widths[at] = width;
                rows.iter_mut().for_each(|row| row[at] = cut(&row[at], width, place));
            }
        }
        widths[0] = widths[0].min(room);
        widths
    }

    /// Returns a table of text. `width`: characters of the screen; None: nothing is cut.
    pub(super) fn table(&self, rows: Vec<[String; N]>, width: Option<usize>) -> String {
        let mut rows = rows;
        rows.iter_mut().flatten().for_each(|cell| *cell = one_line(cell).into_owned());
        let mut wanted = widths(self.titles, &rows);
        let gap = if line(&wanted, 2) <= width.unwrap_or(USUAL_WIDTH) { 2 } else { 1 };
        if let Some(width) = width {
            wanted = self.fit(&mut rows, gap, width);
        }
        aligned(self.titles, &rows, wanted, gap)
    }
}

/// Returns the characters of a line with columns of these widths.
fn line(widths: &[usize], gap: usize) -> usize {
    let shown = widths.iter().filter(|width| **width > 0);
    shown.map(|width| width + gap).sum::<usize>().saturating_sub(gap)
}

/// Cuts a text that has more than `width` characters.
pub(super) fn cut(text: &str, width: usize, place: Cut) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let tail = match place {
        Cut::End => 0,
        Cut::Middle => width / 2,
    };
    let head = width.saturating_sub(tail + 1);
    let ellipsis = if width > 0 { "…" } else { "" };
    text.chars().take(head).chain(ellipsis.chars()).chain(text.chars().skip(length - tail)).collect()
}

#[cfg(test)]
mod tests;
