//! Plots as SVG: panels of lines or of stacked bars, with one legend for all.
//!
//! Everything is text and plain shapes: no script, no font of its own, nothing from elsewhere.

mod axis;

use std::fmt::Write;

pub use axis::{Axis, Scale};

/// Colours that people with any kind of sight can tell apart (Okabe and Ito), and some more.
const COLOURS: [&str; 12] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31", "#7f7f7f", "#882255",
    "#999933", "#332288",
];

/// The `number`th colour.
pub fn colour(number: usize) -> &'static str {
    COLOURS[number % COLOURS.len()]
}

/// A figure.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What it shows.
    pub title: String,
    /// How it was made, in one line.
    pub note: String,
    /// Its parts.
    pub panels: Vec<Panel>,
    /// Panels in a row.
    pub columns: usize,
    /// What the colours mean.
    pub legend: Vec<(String, &'static str)>,
}

/// One pair of axes.
#[derive(Clone, Debug)]
pub struct Panel {
    /// What is special to it; may be empty.
    pub title: String,
    /// What is in it.
    pub marks: Marks,
    /// Up.
    pub y: Axis,
}

/// What a panel shows.
#[derive(Clone, Debug)]
pub enum Marks {
    /// Lines over an axis.
    Lines(Axis, Vec<Line>),
    /// Bars side by side, with what they are by.
    Bars(String, Vec<Bar>),
}

/// A line through points.
#[derive(Clone, Debug)]
pub struct Line {
    /// Its colour.
    pub colour: &'static str,
    /// Broken.
    pub is_dashed: bool,
    /// Its points.
    pub points: Vec<(f64, f64)>,
}

/// A bar of parts, from below.
#[derive(Clone, Debug)]
pub struct Bar {
    /// Below it.
    pub label: String,
    /// Above it.
    pub note: String,
    /// Lengths and colours.
    pub parts: Vec<(f64, &'static str)>,
}

const PANEL: (f64, f64) = (460.0, 330.0);
/// Around the plot in a panel: left, top, right, bottom.
const MARGIN: (f64, f64, f64, f64) = (66.0, 34.0, 22.0, 52.0);
/// A character's width as part of the text's height, generously: there is no font to measure.
const CHARACTER: f64 = 0.62;

/// A rectangle on the page: left, top, width, height.
#[derive(Clone, Copy)]
struct Area(f64, f64, f64, f64);

impl Area {
    fn x(&self, place: f64) -> f64 {
        self.0 + place * self.2
    }

    fn y(&self, place: f64) -> f64 {
        self.1 + (1.0 - place) * self.3
    }
}

impl Figure {
    /// The figure as an SVG document.
    pub fn to_svg(&self) -> String {
        let columns = self.columns.clamp(1, self.panels.len().max(1));
        let width = columns as f64 * PANEL.0 + 20.0;
        let mut page = Page(String::new());
        page.text(width / 2.0, 28.0, 18.0, "middle", "#111", &self.title);
        page.text(width / 2.0, 48.0, 11.0, "middle", "#555", &self.note);
        let top = page.legend(&self.legend, 70.0, width) + 8.0;
        for (number, panel) in self.panels.iter().enumerate() {
            let (row, column) = (number / columns, number % columns);
            let (left, top) = (10.0 + column as f64 * PANEL.0, top + row as f64 * PANEL.1);
            let (width, height) = (PANEL.0 - MARGIN.0 - MARGIN.2, PANEL.1 - MARGIN.1 - MARGIN.3);
            page.panel(panel, Area(left + MARGIN.0, top + MARGIN.1, width, height));
        }
        let height = top + self.panels.len().div_ceil(columns) as f64 * PANEL.1 + 10.0;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
             height=\"{height:.0}\" font-family=\"system-ui, Helvetica, Arial, sans-serif\">\n<title>{}</title>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{}</svg>\n",
            escape(&self.title),
            page.0
        )
    }
}

/// The document as it grows. Writing to a string cannot fail, so what `write` returns is dropped.
struct Page(String);

impl Page {
    fn text(&mut self, x: f64, y: f64, size: f64, anchor: &str, fill: &str, text: &str) {
        let text = escape(text);
        let _ = writeln!(
            self.0,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{fill}\">{text}</text>"
        );
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), stroke: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        let _ =
            writeln!(self.0, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{stroke}\"/>");
    }

    fn rect(&mut self, Area(x, y, width, height): Area, fill: &str) {
        let _ = writeln!(
            self.0,
            "<rect x=\"{x:.1}\" y=\"{y:.2}\" width=\"{width:.1}\" height=\"{height:.2}\" fill=\"{fill}\"/>"
        );
    }

    /// Rows of keys from `top`; where the next thing may begin.
    fn legend(&mut self, keys: &[(String, &'static str)], top: f64, width: f64) -> f64 {
        let widths: Vec<f64> =
            keys.iter().map(|(name, _)| 40.0 + name.chars().count() as f64 * 12.0 * CHARACTER).collect();
        let (mut y, mut next) = (top, 0);
        while next < keys.len() {
            let mut end = next;
            let mut row = 0.0;
            while end < keys.len() && (end == next || row + widths[end] <= width - 40.0) {
                row += widths[end];
                end += 1;
            }
            let mut x = (width - row) / 2.0;
            for number in next..end {
                self.rect(Area(x, y - 9.0, 18.0, 9.0), keys[number].1);
                self.text(x + 24.0, y, 12.0, "start", "#111", &keys[number].0);
                x += widths[number];
            }
            next = end;
            y += 18.0;
        }
        y
    }

    fn panel(&mut self, panel: &Panel, area: Area) {
        let Area(left, top, width, height) = area;
        self.text(left + width / 2.0, top - 12.0, 13.0, "middle", "#111", &panel.title);
        self.y_axis(&panel.y, area);
        match &panel.marks {
            Marks::Lines(x, lines) => {
                self.x_axis(x, area);
                lines.iter().for_each(|line| self.curve(line, x, &panel.y, area));
            }
            Marks::Bars(label, bars) => self.bars(label, bars, &panel.y, area),
        }
        self.line((left, top + height), (left + width, top + height), "#333");
        self.line((left, top), (left, top + height), "#333");
    }

    fn y_axis(&mut self, axis: &Axis, area: Area) {
        let Area(left, top, width, height) = area;
        for (value, text) in &axis.ticks {
            let y = area.y(axis.place(*value));
            self.line((left, y), (left + width, y), "#e4e4e4");
            self.text(left - 6.0, y + 4.0, 11.0, "end", "#333", text);
        }
        let (x, y) = (left - 50.0, top + height / 2.0);
        let _ = writeln!(
            self.0,
            "<text transform=\"translate({x:.1} {y:.1}) rotate(-90)\" font-size=\"12\" text-anchor=\"middle\" \
             fill=\"#333\">{}</text>",
            escape(&axis.label)
        );
    }

    fn x_axis(&mut self, axis: &Axis, area: Area) {
        let Area(left, top, width, height) = area;
        for (value, text) in &axis.ticks {
            let x = area.x(axis.place(*value));
            self.line((x, top), (x, top + height), "#e4e4e4");
            self.text(x, top + height + 16.0, 11.0, "middle", "#333", text);
        }
        self.text(left + width / 2.0, top + height + 38.0, 12.0, "middle", "#333", &axis.label);
    }

    fn curve(&mut self, line: &Line, x: &Axis, y: &Axis, area: Area) {
        let points = line.points.iter().map(|point| (area.x(x.place(point.0)), area.y(y.place(point.1))));
        let path: Vec<String> = points.clone().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let dash = if line.is_dashed { " stroke-dasharray=\"6 4\"" } else { "" };
        let _ = writeln!(
            self.0,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-linejoin=\"round\"{dash}/>",
            path.join(" "),
            line.colour
        );
        for (x, y) in points {
            let _ = writeln!(self.0, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\" fill=\"{}\"/>", line.colour);
        }
    }

    fn bars(&mut self, label: &str, bars: &[Bar], axis: &Axis, area: Area) {
        let Area(left, top, width, height) = area;
        // Notes are wider than bars: the first may not reach over the axis.
        let (left, width) = (left + 10.0, width - 10.0);
        let step = width / bars.len().max(1) as f64;
        let breadth = step * 0.72;
        // Two rows of labels have room for twice as many.
        let rows = stride(bars.iter().map(|bar| bar.label.as_str()), 10.0, step).min(2);
        let labels = stride(bars.iter().map(|bar| bar.label.as_str()), 10.0, 2.0 * step);
        let notes = stride(bars.iter().map(|bar| bar.note.as_str()), 9.5, step);
        for (number, bar) in bars.iter().enumerate() {
            let middle = left + (number as f64 + 0.5) * step;
            let mut sum = 0.0;
            for (value, colour) in &bar.parts {
                let below = area.y(axis.place(sum));
                sum += value;
                let above = area.y(axis.place(sum));
                self.rect(Area(middle - breadth / 2.0, above, breadth, below - above), colour);
            }
            if number % notes == 0 {
                self.text(middle, area.y(axis.place(sum)) - 4.0, 9.5, "middle", "#333", &bar.note);
            }
            if number % labels == 0 {
                let row = (number / labels % rows) as f64;
                self.text(middle, top + height + 14.0 + 11.0 * row, 10.0, "middle", "#333", &bar.label);
            }
        }
        self.text(left + width / 2.0, top + height + 40.0, 12.0, "middle", "#333", label);
    }
}

/// Of texts side by side, `step` apart, every how many there is room for.
fn stride<'a>(texts: impl Iterator<Item = &'a str>, size: f64, step: f64) -> usize {
    let widest = texts.map(|text| text.chars().count()).max().unwrap_or(0) as f64 * size * CHARACTER + 4.0;
    (widest / step).ceil().max(1.0) as usize
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // No other control character may be in XML.
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests;
