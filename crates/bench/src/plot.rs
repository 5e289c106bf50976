//! Draws a table with a numeric axis as SVG: panels side by side, with one legend.
//!
//! The picture has the figures of the table and nothing else: straight lines between points, the
//! y axis from 0. It has a white background, so that it can be read on a dark page, too. The same
//! data give the same bytes. Text is escaped, and a control character is replaced.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::prelude::*;

use vshunt_guest::error::{Error, Kind, Result};
use vshunt_guest::fail;

/// Panels in a row, and their sizes in pixels.
const COLUMNS_MAX: usize = 3;
const PANEL: (usize, usize) = (360, 320);
/// Least width, which the lines above the panels need.
const WIDTH_MIN: usize = 760;
const MARGIN: i32 = 16;
/// Distance between the base lines of text.
const LINE_HEIGHT: i32 = 20;
/// Estimated width of a character in text of 13 pixels.
const CHARACTER: usize = 7;

const TEXT: RGBColor = RGBColor(32, 32, 32);
const GRID: RGBColor = RGBColor(221, 221, 221);
/// The colours of Okabe and Ito, which people with colour blindness can tell apart, without yellow.
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];
/// Half of the width of a marker.
const MARKER: i32 = 4;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<T = ()> = std::result::Result<T, DrawingAreaErrorKind<std::io::Error>>;

/// A picture of a table.
#[derive(Clone, Debug)]
pub struct Plot {
    /// What is shown.
    pub title: String,
    /// Lines below the title: conditions, machine, command.
    pub notes: Vec<String>,
    /// The x axis of all panels.
    pub x: Axis,
    /// Name and unit of the y axis.
    pub y: &'static str,
    /// The panels, each with a y axis of its own.
    pub panels: Vec<Panel>,
}

/// The x axis: its name and unit. It is labelled at the points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// From 0.
    Linear(&'static str),
    /// Each doubling has the same length. Values are 1 or more.
    Doubling(&'static str),
}

/// A coordinate system.
#[derive(Clone, Debug)]
pub struct Panel {
    /// What is common to its lines.
    pub title: String,
    /// The lines. Those of the same name look the same in all panels.
    pub lines: Vec<Line>,
}

/// A row of the table.
#[derive(Clone, Debug)]
pub struct Line {
    /// Name in the legend.
    pub name: String,
    /// The figures, as (x, y).
    pub points: Vec<(f64, f64)>,
}

/// Returns the panel with this title, which is made if it is missing.
pub fn panel(panels: &mut Vec<Panel>, title: String) -> &mut Panel {
    let at = panels.iter().position(|panel| panel.title == title).unwrap_or_else(|| {
        panels.push(Panel { title, lines: Vec::new() });
        panels.len() - 1
    });
    &mut panels[at]
}

/// The file of `--plot`.
#[derive(Debug)]
pub struct Target(PathBuf);

impl Target {
    /// Checks that a plot can be written to `path`, and leaves what is there as it is.
    ///
    /// # Errors
    /// `Usage` for the name of another format. `System` if the file cannot be written.
    pub fn new(path: &Path) -> Result<Self> {
        if path.extension().is_some_and(|ending| !ending.eq_ignore_ascii_case("svg")) {
            let path = path.display();
            return Err(fail!(Usage, "--plot {path}: plots are SVG: name a file that ends in .svg"));
        }
        let failed = |e| unwritable(path, e);
        match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(_) => std::fs::remove_file(path).map_err(failed)?,
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                OpenOptions::new().write(true).open(path).map_err(failed)?;
            }
            Err(e) => return Err(failed(e)),
        }
        Ok(Self(path.to_owned()))
    }

    /// Writes the picture.
    ///
    /// # Errors
    /// `System` if the file cannot be written.
    pub fn write(&self, plot: &Plot) -> Result<()> {
        std::fs::write(&self.0, plot.svg()?).map_err(|e| unwritable(&self.0, e))
    }
}

fn unwritable(path: &Path, error: std::io::Error) -> Error {
    let message = format!("--plot {}: name a file that can be written", path.display());
    Error::with(Kind::System, message, error)
}

/// Returns this process's command line as a shell takes it, with the program's name only.
pub fn command_line() -> String {
    let mut args = std::env::args_os();
    let program = args.next().map(PathBuf::from).unwrap_or_default();
    let program = program.file_name().unwrap_or_default().to_owned();
    shown(std::iter::once(program).chain(args))
}

fn shown(words: impl Iterator<Item = OsString>) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./,:=+@%".contains(c);
    let quoted = words.map(|word| {
        let word = word.to_string_lossy();
        match !word.is_empty() && word.chars().all(plain) {
            true => word.into_owned(),
            false => format!("'{}'", word.replace('\'', r"'\''")),
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

/// An x axis from 0 to `end`, with a label at each of `ticks`.
struct LabelledAxis {
    end: f64,
    ticks: Vec<f64>,
}

impl Ranged for LabelledAxis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        from + (f64::from(to - from) * value / self.end).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> std::ops::Range<f64> {
        0.0..self.end
    }
}

/// The place of everything above the panels.
struct Header {
    notes: Vec<String>,
    /// Names of the legend, with the places of their samples.
    legend: Vec<(String, (i32, i32))>,
    height: i32,
}

impl Plot {
    /// Returns the picture.
    ///
    /// # Errors
    /// `System` if the library cannot draw.
    pub fn svg(&self) -> Result<String> {
        let mut svg = String::new();
        let columns = self.panels.len().clamp(1, COLUMNS_MAX);
        let rows = self.panels.len().div_ceil(columns);
        let width = (columns * PANEL.0).max(WIDTH_MIN);
        let header = self.header(width);
        let size = (width as u32, (rows * PANEL.1) as u32 + header.height as u32);
        {
            let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            self.draw(&root, &header, (rows, columns))
                .map_err(|e| fail!(System, "cannot draw the plot: {e}"))?;
        }
        Ok(svg)
    }

    /// Returns the names of the lines, each once.
    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for line in self.panels.iter().flat_map(|panel| &panel.lines) {
            if !names.contains(&&line.name[..]) {
                names.push(&line.name);
            }
        }
        names
    }

    fn header(&self, width: usize) -> Header {
        let letters = (width - 2 * MARGIN as usize) / CHARACTER;
        let notes: Vec<_> = self.notes.iter().flat_map(|note| wrap(&printable(note), letters)).collect();
        let mut at = (MARGIN, MARGIN + 24 + LINE_HEIGHT * notes.len() as i32 + LINE_HEIGHT / 2);
        let mut legend = Vec::new();
        for name in self.names() {
            let length = (50 + CHARACTER * name.chars().count()) as i32;
            if at.0 > MARGIN && at.0 + length > width as i32 - MARGIN {
                at = (MARGIN, at.1 + LINE_HEIGHT);
            }
            legend.push((printable(name), at));
            at.0 += length;
        }
        Header { notes, legend, height: at.1 + LINE_HEIGHT }
    }

    fn draw(&self, root: &Area, header: &Header, cells: (usize, usize)) -> Drawn {
        root.fill(&WHITE)?;
        let title = ("sans-serif", 22, FontStyle::Bold, &TEXT).into_text_style(root);
        root.draw(&Text::new(printable(&self.title), (MARGIN, 10), title))?;
        let small = ("sans-serif", 16, &TEXT).into_text_style(root);
        for (i, note) in header.notes.iter().enumerate() {
            let at = (MARGIN, MARGIN + 22 + LINE_HEIGHT * i as i32);
            root.draw(&Text::new(note.clone(), at, small.clone()))?;
        }
        for (i, (name, (x, y))) in header.legend.iter().enumerate() {
            curve(root, i, &[(*x, y + 7), (x + 13, y + 7), (x + 26, y + 7)], 1..2)?;
            root.draw(&Text::new(name.clone(), (x + 34, *y), small.clone()))?;
        }
        let (_, below) = root.split_vertically(header.height);
        for (panel, area) in self.panels.iter().zip(below.split_evenly(cells)) {
            self.draw_panel(root, panel, &area)?;
        }
        root.present()
    }

    fn draw_panel(&self, root: &Area, panel: &Panel, area: &Area) -> Drawn {
        let points = || panel.lines.iter().flat_map(|line| line.points.iter().copied());
        let (name, place): (_, fn(f64) -> f64) = match self.x {
            Axis::Linear(name) => (name, |x| x),
            Axis::Doubling(name) => (name, f64::log2),
        };
        let mut ticks: Vec<f64> = points().map(|(x, _)| place(x)).collect();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        let value =
            |tick: &f64| format!("{:.0}", if self.x == Axis::Linear(name) { *tick } else { tick.exp2() });
        let last = ticks.last().map_or(1.0, |&tick| tick.max(1.0));
        let most = points().map(|(_, y)| y).fold(0.0, f64::max);
        let top = if most > 0.0 { most * 1.08 } else { 1.0 };
        let mut chart = ChartBuilder::on(area)
            .caption(printable(&panel.title), ("sans-serif", 17, &TEXT))
            .margin(8)
            .margin_right(MARGIN)
            .x_label_area_size(46)
            .y_label_area_size(70)
            .build_cartesian_2d(LabelledAxis { end: last * 1.04, ticks }, 0.0..top)?;
        chart
            .configure_mesh()
            .axis_style(TEXT)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .label_style(("sans-serif", 15, &TEXT))
            .axis_desc_style(("sans-serif", 16, &TEXT))
            .y_labels(7)
            .x_label_formatter(&value)
            .y_label_formatter(&|rate| show_tick(*rate))
            .x_desc(name)
            .y_desc(self.y)
            .draw()?;
        let names = self.names();
        for line in &panel.lines {
            let mut points = line.points.clone();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let to_pixel = |(x, y)| chart.plotting_area().map_coordinate(&(place(x), y));
            let points: Vec<_> = points.into_iter().map(to_pixel).collect();
            let style = names.iter().position(|name| *name == line.name).unwrap_or(0);
            curve(root, style, &points, 0..points.len())?;
        }
        Ok(())
    }
}

/// Draws a line through points, and markers at those of `marked`. Both depend on `style`.
fn curve(root: &Area, style: usize, points: &[(i32, i32)], marked: std::ops::Range<usize>) -> Drawn {
    let color = COLORS[style % COLORS.len()];
    root.draw(&PathElement::new(points, color.stroke_width(2)))?;
    for &(x, y) in &points[marked] {
        match style % 4 {
            0 => root.draw(&Circle::new((x, y), MARKER, color.filled()))?,
            1 => root.draw(&TriangleMarker::new((x, y), MARKER + 2, color.filled()))?,
            2 => {
                let corners = [(x - MARKER, y - MARKER), (x + MARKER, y + MARKER)];
                root.draw(&Rectangle::new(corners, color.filled()))?;
            }
            _ => root.draw(&Cross::new((x, y), MARKER, color.stroke_width(2)))?,
        }
    }
    Ok(())
}

/// Formats a rate at an axis: `0`, `50k`, `1.5M`.
fn show_tick(rate: f64) -> String {
    let (scaled, unit) = match rate {
        r if r >= 1e6 => (r / 1e6, "M"),
        r if r >= 1e3 => (r / 1e3, "k"),
        r => (r, ""),
    };
    let digits = format!("{scaled:.2}");
    format!("{}{unit}", digits.trim_end_matches('0').trim_end_matches('.'))
}

/// Replaces the characters that XML does not allow.
fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') { '\u{fffd}' } else { c })
        .collect()
}

/// Breaks text between words into lines of at most `letters` characters. Longer words stay whole.
fn wrap(text: &str, letters: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is one");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > letters {
            lines.push(format!("    {word}"));
        } else {
            line.push_str(if line.is_empty() { "" } else { " " });
            line.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, points: &[(f64, f64)]) -> Line {
        Line { name: name.into(), points: points.to_vec() }
    }

    fn plot() -> Plot {
        let first = Panel {
            title: "format=null".into(),
            lines: vec![
                // Points are drawn in the order of x.
                line("one <worker>", &[(16.0, 2e6), (1.0, 0.0), (4.0, 1e6)]),
                line("two & more", &[(1.0, 5e5), (16.0, 5e5)]),
            ],
        };
        let second =
            Panel { title: "format=ram".into(), lines: vec![line("two & more", &[(1.0, 3e3), (2.0, 6e3)])] };
        Plot {
            title: "IOPS by \"jobs\"".into(),
            notes: vec!["a\u{1}b".into(), "$ vshunt-bench ".to_owned() + &"word ".repeat(60)],
            x: Axis::Doubling("requests"),
            y: "IOPS",
            panels: vec![first, second],
        }
    }

    fn texts(svg: &str) -> Vec<String> {
        let document = roxmltree::Document::parse(svg).unwrap();
        let texts =
            document.descendants().filter(|node| node.has_tag_name(("http://www.w3.org/2000/svg", "text")));
        texts.map(|node| node.text().unwrap_or_default().trim().to_owned()).collect()
    }

    /// The points of the polylines that have a colour.
    fn polylines(svg: &str, color: RGBColor) -> Vec<Vec<(i32, i32)>> {
        let document = roxmltree::Document::parse(svg).unwrap();
        let stroke = format!("#{:02X}{:02X}{:02X}", color.0, color.1, color.2);
        let lines = document
            .descendants()
            .filter(|node| node.attribute("points").is_some() && node.attribute("stroke") == Some(&stroke));
        let pair = |text: &str| {
            let (x, y) = text.split_once(',').unwrap();
            (x.parse().unwrap(), y.parse().unwrap())
        };
        lines.map(|node| node.attribute("points").unwrap().split_whitespace().map(pair).collect()).collect()
    }

    #[test]
    fn the_picture_has_all_labels() {
        let svg = plot().svg().unwrap();
        let texts = texts(&svg);
        for text in [
            "IOPS by \"jobs\"",
            "a\u{fffd}b",
            "one <worker>",
            "two & more",
            "format=null",
            "requests",
            "IOPS",
        ] {
            assert!(texts.iter().any(|t| t == text), "no {text:?} in {texts:?}");
        }
        // The ticks of both axes.
        for text in ["0", "1", "4", "16", "1M", "1.5M", "2M", "2k"] {
            assert!(texts.iter().any(|t| t == text), "no {text:?} in {texts:?}");
        }
        assert_eq!(texts.iter().filter(|t| *t == "two & more").count(), 1, "one legend for all panels");
        let words: usize = texts.iter().map(|t| t.matches("word").count()).sum();
        assert_eq!(words, 60, "a long line is wrapped");
        assert_eq!(svg, plot().svg().unwrap(), "the same data give the same bytes");
    }

    #[test]
    fn points_are_where_their_figures_are() {
        let svg = plot().svg().unwrap();
        // The first polyline of a colour is the legend's sample.
        let lines = polylines(&svg, COLORS[0]);
        let [_, line] = &lines[..] else { panic!("{lines:?}") };
        let [(x0, y0), (x1, y1), (x2, y2)] = line[..] else { panic!("{line:?}") };
        assert!(((y0 - y1) - (y1 - y2)).abs() <= 1, "0, 1M and 2M stand at equal distances: {line:?}");
        assert!(((x1 - x0) - (x2 - x1)).abs() <= 1, "1, 4 and 16 stand at equal distances: {line:?}");
        let lines = polylines(&svg, COLORS[1]);
        let [_, flat, steep] = &lines[..] else { panic!("{lines:?}") };
        assert_eq!(flat[0].1, flat[1].1);
        assert!(((y0 - flat[0].1) * 4 - (y0 - y2)).abs() <= 4, "500k of 2M is a quarter: {flat:?}");
        assert!(steep[0].0 > 360 && steep[0].1 > steep[1].1, "the second panel has its own axis: {steep:?}");
    }

    #[test]
    fn a_linear_axis_begins_at_zero() {
        let points = [(1.0, 1.0), (2.0, 2.0)];
        let panels = vec![Panel { title: String::new(), lines: vec![line("a", &points)] }];
        let svg = Plot { x: Axis::Linear("jobs"), panels, ..plot() }.svg().unwrap();
        let lines = polylines(&svg, COLORS[0]);
        let [(x0, y0), (x1, y1)] = lines[1][..] else { panic!("{lines:?}") };
        assert!(x1 - x0 > 200 && y0 - y1 > 80, "1 and 2 are half of the axes apart: {lines:?}");
    }

    #[test]
    fn a_table_without_figures_can_be_drawn() {
        for panels in [vec![], vec![Panel { title: "none".into(), lines: vec![line("a", &[])] }]] {
            texts(&Plot { panels, ..plot() }.svg().unwrap());
        }
        let single = vec![Panel { title: "one".into(), lines: vec![line("a", &[(1.0, 0.0)])] }];
        texts(&Plot { panels: single, ..plot() }.svg().unwrap());
    }

    #[test]
    fn a_file_is_checked_and_left_as_it_is() {
        let folder = std::env::temp_dir().join(format!("vshunt-plot-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (old, new) = (folder.join("old.svg"), folder.join("new.SVG"));
        std::fs::write(&old, "before").unwrap();
        let target = Target::new(&old).unwrap();
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "before");
        target.write(&plot()).unwrap();
        assert!(std::fs::read_to_string(&old).unwrap().starts_with("<svg"));
        Target::new(&new).unwrap();
        assert!(!new.exists(), "nothing is left if the measurement fails");
        assert_eq!(Target::new(&folder.join("a.png")).unwrap_err().kind(), Kind::Usage);
        let missing = Target::new(&folder.join("no/a.svg")).unwrap_err();
        assert!(missing.kind() == Kind::System && missing.to_string().contains("--plot"), "{missing}");
        assert_eq!(Target::new(&folder).unwrap_err().kind(), Kind::System);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_command_line_can_be_pasted() {
        let words = ["vshunt-bench", "--rw=randrw", "a b", "it's", ""].map(OsString::from);
        assert_eq!(shown(words.into_iter()), r"vshunt-bench --rw=randrw 'a b' 'it'\''s' ''");
        assert_eq!(show_tick(0.0) + &show_tick(250_000.0) + &show_tick(1.25e6), "0250k1.25M");
    }
}
