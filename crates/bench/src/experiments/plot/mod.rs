//! Figures as SVG: panels with lines, points, bars or a heat map.
//!
//! A figure is for people who look rather than read. So every axis has a unit, lines carry their names at their ends, a name has
//! the same colour and marker in every figure ([`style`]), spreads are drawn, and fewer than three points are not joined.
//! Panels of a row have the same axes when the caller gives them the same axes.
//!
//! Everything is text and plain shapes: no script, no font of its own, nothing from elsewhere. Light and dark follow the
//! reader's setting (`prefers-color-scheme`). No two texts overlap, and none leaves the page: [`Figure::faults`] looks for that.
//!
//! ```
//! use spile_bench::experiments::plot::{Axis, Figure, Marks, Panel, Point, Series, styles};
//!
//! let names = ["grant-copy", "nbd"];
//! let line = |(name, style)| Series {
//!     name: name_of(name),
//!     style,
//!     points: [4096.0, 8192.0, 16384.0].map(|size| Point::new(size, 1.0).within(0.9, 1.2)).to_vec(),
//! };
//! # fn name_of(name: &str) -> String { name.to_owned() }
//! let series = names.into_iter().zip(styles(names)).map(line).collect();
//! let (x, y) = (Axis::sizes("request", &[4096, 8192, 16384]), Axis::linear("ratio to grant-copy", 1.2));
//! let panel = Panel { title: "read".into(), marks: Marks::Series { x, y, series, reference: Some(1.0) } };
//! let figure = Figure { title: "What a path costs".into(), panels: vec![panel], columns: 1, ..Figure::default() };
//! assert!(figure.faults().is_empty());
//! let file = figure.to_svg();
//! # assert!(file.starts_with("<svg"));
//! ```

mod axis;
mod bars;
mod heat;
mod page;
mod series;
mod style;
mod text;
mod values;

pub use axis::{Axis, Scale, plain};
pub use style::{Marker, Style, part, sheet, style, styles};
pub use text::escape;
pub use values::Value;

use page::{Area, Page};
use text::{Anchor, TextBox, width, wrap};

/// A figure.
#[derive(Clone, Debug, Default)]
pub struct Figure {
    /// What it shows.
    pub title: String,
    /// How it was made.
    pub note: String,
    /// What a reader must know before all else, such as [`QUICK`].
    pub mark: Option<String>,
    /// Its parts.
    pub panels: Vec<Panel>,
    /// Panels in a row of the file; a page shows as many as it has room for.
    pub columns: usize,
    /// What the colours mean where lines do not carry their names: the parts of bars.
    pub keys: Vec<(String, Style)>,
}

/// The mark of figures of a quick run.
pub const QUICK: &str = "quick: few rounds";

/// One pair of axes.
#[derive(Clone, Debug)]
pub struct Panel {
    /// What is special to it; may be empty.
    pub title: String,
    /// What is in it.
    pub marks: Marks,
}

/// What a panel shows.
#[derive(Clone, Debug)]
pub enum Marks {
    /// Lines, or points where there are fewer than three.
    Series {
        /// To the right.
        x: Axis,
        /// Up.
        y: Axis,
        /// What is drawn; a name that is not empty stands at the right end.
        series: Vec<Series>,
        /// A value of `y` with a line across the panel, such as 1 for ratios.
        reference: Option<f64>,
    },
    /// Bars to the right, one below the other, each with its name before it.
    Bars {
        /// To the right.
        x: Axis,
        /// From above.
        bars: Vec<Bar>,
        /// A value of `x` with a line across the panel, such as 1 for ratios.
        reference: Option<f64>,
    },
    /// A value for each pair of a column and a row.
    Heat(Heat),
}

/// Points of one name.
#[derive(Clone, Debug)]
pub struct Series {
    /// Stands at its right end; may be empty.
    pub name: String,
    /// Its look; see [`styles`].
    pub style: Style,
    /// From left to right.
    pub points: Vec<Point>,
}

/// A value and its spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Where it is on the axis to the right.
    pub x: f64,
    /// The value, usually a median.
    pub y: f64,
    /// A tenth of what was measured is below the first, nine tenths are below the second.
    pub spread: Option<(f64, f64)>,
}

impl Point {
    /// A value whose spread is not known.
    pub fn new(x: f64, y: f64) -> Self {
        Self { x, y, spread: None }
    }

    /// With the values that a tenth and nine tenths of what was measured are below.
    pub fn within(self, low: f64, high: f64) -> Self {
        Self { spread: Some((low, high)), ..self }
    }
}

/// A bar of parts, from the left.
#[derive(Clone, Debug)]
pub struct Bar {
    /// Before it.
    pub name: String,
    /// Behind it.
    pub note: String,
    /// Lengths and looks.
    pub parts: Vec<(f64, Style)>,
    /// A tenth and nine tenths of what was measured are below these.
    pub spread: Option<(f64, f64)>,
}

/// A value for each pair of a column and a row.
#[derive(Clone, Debug)]
pub struct Heat {
    /// What the columns are, with the unit.
    pub x: String,
    /// The columns' names.
    pub columns: Vec<String>,
    /// What the rows are, with the unit.
    pub y: String,
    /// The rows' names, from below.
    pub rows: Vec<String>,
    /// What the values are, with the unit.
    pub value: String,
    /// By row and column; `None` where nothing was measured.
    pub values: Vec<Vec<Option<f64>>>,
}

/// A panel's width; also on a phone it is hardly made smaller.
const PANEL: f64 = 372.0;
/// Between panels, and around all.
const GAP: f64 = 14.0;
/// Text sizes: the figure's title, a panel's title, everything else.
const TITLE: f64 = 17.0;
const HEADING: f64 = 13.0;
const SMALL: f64 = 11.0;
/// From one base line to the next.
const LEADING: f64 = 1.25;

/// A figure as drawn.
struct Drawn {
    size: (f64, f64),
    page: Page,
}

impl Figure {
    /// The figure as an SVG document.
    pub fn to_svg(&self) -> String {
        let Drawn { size, page } = self.draw();
        let style = format!("<style>{}</style>\n<rect width=\"100%\" height=\"100%\" class=\"ground\"/>\n", sheet());
        document(size, "figure", &self.title, &self.description(), &format!("{style}{}", page.svg))
    }

    /// Each panel as an SVG element of its own, for a page that has the [`sheet`] and shows the title, the note and the mark
    /// itself. `id` is a name that no other figure of the page has.
    pub fn to_elements(&self, id: &str) -> Vec<String> {
        let keys = (!self.keys.is_empty()).then(|| {
            let mut page = Page::default();
            let bottom = keys(&mut page, &self.keys, 0.0, PANEL);
            document((PANEL, bottom), &format!("{id}-keys"), "Colours", &names(&self.keys), &page.svg)
        });
        let panel = |(number, panel): (usize, &Panel)| {
            let mut page = Page::default();
            let bottom = panel.draw(&mut page, (0.0, 0.0), None);
            let title = if panel.title.is_empty() { &self.title } else { &panel.title };
            document((PANEL, bottom), &format!("{id}-{number}"), title, &panel.description(), &page.svg)
        };
        keys.into_iter().chain(self.panels.iter().enumerate().map(panel)).collect()
    }

    /// Texts that overlap or leave the page, in words; empty when the figure is well.
    pub fn faults(&self) -> Vec<String> {
        let Drawn { size, page } = self.draw();
        faults(&page.texts, size)
    }

    fn draw(&self) -> Drawn {
        let columns = self.columns.clamp(1, self.panels.len().max(1));
        let width = columns as f64 * (PANEL + GAP) + GAP;
        let mut page = Page::default();
        let mut top = self.head(&mut page, width);
        for row in self.panels.chunks(columns) {
            let height = row.iter().map(Panel::height).fold(0.0, f64::max);
            for (column, panel) in row.iter().enumerate() {
                panel.draw(&mut page, (GAP + column as f64 * (PANEL + GAP), top), Some(height));
            }
            top += height + GAP;
        }
        Drawn { size: (width, top), page }
    }

    /// The title, the mark, the note and the keys; where the panels may begin.
    fn head(&self, page: &mut Page, width: f64) -> f64 {
        let room = width - 2.0 * GAP;
        let mut y = paragraph(page, (GAP, GAP), TITLE, room, "", &self.title);
        if let Some(mark) = &self.mark {
            let box_width = text::width(mark, SMALL) + 12.0;
            page.shape(
                &[(GAP, y + 4.0), (GAP + box_width, y + 4.0), (GAP + box_width, y + 22.0), (GAP, y + 22.0)],
                "polygon",
                "fill=\"none\" class=\"q\"",
            );
            page.text((GAP + 6.0, y + 17.0), SMALL, Anchor::Start, "w", mark);
            y += 26.0;
        }
        y = paragraph(page, (GAP, y + 2.0), SMALL, room, "u", &self.note);
        if !self.keys.is_empty() {
            y = keys(page, &self.keys, y + 6.0, width);
        }
        y + GAP
    }

    /// What a screen reader says of the whole.
    fn description(&self) -> String {
        let mark = self.mark.iter().map(|mark| format!("{mark}. "));
        let panels = self.panels.iter().map(|panel| match panel.title.as_str() {
            "" => panel.description(),
            title => format!("{title}: {}", panel.description()),
        });
        mark.chain([format!("{} ", self.note)]).chain(panels).collect()
    }
}

/// Texts that overlap or leave a page of that size.
fn faults(texts: &[TextBox], (width, height): (f64, f64)) -> Vec<String> {
    let is_outside = |text: &&TextBox| {
        let [left, top, right, bottom] = text.sides;
        left < 0.0 || top < 0.0 || right > width || bottom > height
    };
    let outside = texts.iter().filter(is_outside).map(|text| format!("`{}` leaves the page", text.text));
    let mut faults: Vec<String> = outside.collect();
    for (number, text) in texts.iter().enumerate() {
        let others = texts[number + 1..].iter().filter(|other| text.meets(other));
        faults.extend(others.map(|other| format!("`{}` overlaps `{}`", text.text, other.text)));
    }
    faults
}

fn document((width, height): (f64, f64), id: &str, title: &str, description: &str, content: &str) -> String {
    let (title, description, id) = (escape(title), escape(description), escape(id));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\" class=\"plot\" role=\"img\" aria-labelledby=\"{id}-title {id}-desc\">\n\
         <title id=\"{id}-title\">{title}</title>\n<desc id=\"{id}-desc\">{description}</desc>\n{content}</svg>\n",
        width = width.ceil(),
        height = height.ceil(),
    )
}

/// Lines of text from `top`; where the next thing may begin.
fn paragraph(page: &mut Page, (left, top): (f64, f64), size: f64, room: f64, class: &str, text: &str) -> f64 {
    let lines = wrap(text, size, room);
    for (number, line) in lines.iter().enumerate() {
        page.text((left, top + size * (1.0 + LEADING * number as f64)), size, Anchor::Start, class, line);
    }
    top + lines.len() as f64 * size * LEADING
}

/// Rows of keys from `top`; where the next thing may begin.
fn keys(page: &mut Page, keys: &[(String, Style)], top: f64, width: f64) -> f64 {
    let (mut x, mut y) = (GAP, top + SMALL);
    for (name, style) in keys {
        let needed = 14.0 + text::width(name, SMALL) + 14.0;
        if x > GAP && x + needed > width {
            (x, y) = (GAP, y + 1.5 * SMALL);
        }
        page.rect(Area(x, y - 8.5, 10.0, 10.0), &format!("f{}", style.ink), "");
        page.text((x + 14.0, y), SMALL, Anchor::Start, "", name);
        x += needed;
    }
    y + 0.5 * SMALL
}

fn names(keys: &[(String, Style)]) -> String {
    keys.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
}

impl Panel {
    fn height(&self) -> f64 {
        self.draw(&mut Page::default(), (0.0, 0.0), None)
    }

    /// Draws it with its left upper corner there, and as high as it must be, or as its row is; its lower end.
    fn draw(&self, page: &mut Page, (left, top): (f64, f64), height: Option<f64>) -> f64 {
        let top_of_marks = paragraph(page, (left, top), HEADING, PANEL, "", &self.title);
        let area = Area(left, top_of_marks, PANEL, height.map_or(0.0, |height| top + height - top_of_marks));
        match &self.marks {
            Marks::Series { x, y, series, reference } => series::draw(page, area, (x, y), series, *reference),
            Marks::Bars { x, bars, reference } => bars::draw(page, area, x, bars, *reference),
            Marks::Heat(heat) => heat::draw(page, area, heat),
        }
    }

    fn description(&self) -> String {
        match &self.marks {
            Marks::Series { x, y, series, .. } => series::describe(x, y, series),
            Marks::Bars { x, bars, .. } => bars::describe(x, bars),
            Marks::Heat(heat) => heat::describe(heat),
        }
    }
}

/// A label above a vertical axis, which is easier to read than one that lies on its side; where the plot may begin.
fn above(page: &mut Page, area: Area, label: &str) -> f64 {
    paragraph(page, (area.0, area.1), SMALL, area.2, "u", label) + 12.0
}

/// The axis below a plot: lines, texts and the label. `from` and `to` are the ends of the panel, which no text leaves. Its
/// lower end.
fn below(page: &mut Page, axis: &Axis, plot: Area, (from, to): (f64, f64)) -> f64 {
    let middle = |x: f64, text: &str| {
        let half = width(text, SMALL) / 2.0;
        if to - from > 2.0 * half { x.clamp(from + half, to - half) } else { (from + to) / 2.0 }
    };
    let places: Vec<f64> = axis.ticks.iter().map(|(value, text)| middle(plot.x(axis.place(*value)), text)).collect();
    let stride = stride(axis, &places);
    for (number, ((value, text), place)) in axis.ticks.iter().zip(places).enumerate() {
        let x = plot.x(axis.place(*value));
        page.line((x, plot.1), (x, plot.bottom()), "g");
        if number % stride == 0 {
            page.text((place, plot.bottom() + 17.0), SMALL, Anchor::Middle, "", text);
        }
    }
    page.line((plot.0, plot.bottom()), (plot.right(), plot.bottom()), "a");
    let lines = wrap(&axis.label, SMALL, to - from);
    for (number, line) in lines.iter().enumerate() {
        let y = plot.bottom() + 32.0 + number as f64 * SMALL * LEADING;
        page.text((middle(plot.0 + plot.2 / 2.0, line), y), SMALL, Anchor::Middle, "u", line);
    }
    plot.bottom() + foot(lines.len())
}

/// What an axis with a label of so many lines takes below a plot.
fn foot(lines: usize) -> f64 {
    23.0 + lines as f64 * SMALL * LEADING
}

/// Every how many of an axis' texts have room beside each other, with their middles at `places`.
fn stride(axis: &Axis, places: &[f64]) -> usize {
    let texts: Vec<(f64, f64)> =
        places.iter().zip(&axis.ticks).map(|(place, (_, text))| (*place, width(text, SMALL))).collect();
    let fits = |stride: usize| {
        let shown: Vec<&(f64, f64)> = texts.iter().step_by(stride).collect();
        shown.windows(2).all(|pair| pair[1].0 - pair[0].0 >= (pair[0].1 + pair[1].1) / 2.0 + 6.0)
    };
    (1..texts.len()).find(|stride| fits(*stride)).unwrap_or(texts.len().max(1))
}

#[cfg(test)]
mod tests;
