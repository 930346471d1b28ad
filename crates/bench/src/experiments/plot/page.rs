//! The SVG as it grows: shapes and texts, and what room the texts take.

use std::fmt::Write;

use super::style::{Marker, Style};
use super::text::{Anchor, TextBox, escape, room};

/// Writing to a string cannot fail, so what `write` returns is dropped.
#[derive(Default)]
pub struct Page {
    /// The document so far.
    pub svg: String,
    /// The room of every text.
    pub texts: Vec<TextBox>,
}

/// A rectangle on the page: left, top, width, height.
#[derive(Clone, Copy, Debug)]
pub struct Area(pub f64, pub f64, pub f64, pub f64);

/// Space between the frame of a plot and its outermost points.
const PAD: f64 = 8.0;

impl Area {
    /// The x of a place from 0 (left) to 1 (right).
    pub fn x(&self, place: f64) -> f64 {
        self.0 + PAD + place * (self.2 - 2.0 * PAD)
    }

    /// The y of a place from 0 (below) to 1 (above).
    pub fn y(&self, place: f64) -> f64 {
        self.1 + (1.0 - place) * self.3
    }

    /// The right end.
    pub fn right(&self) -> f64 {
        self.0 + self.2
    }

    /// The lower end.
    pub fn bottom(&self) -> f64 {
        self.1 + self.3
    }
}

/// Half the breadth of a marker.
pub const MARKER: f64 = 3.6;

impl Page {
    /// A text with its base line at `y`, of a class of [`super::style::sheet`].
    pub fn text(&mut self, (x, y): (f64, f64), size: f64, anchor: Anchor, class: &str, text: &str) {
        if text.is_empty() {
            return;
        }
        self.texts.push(room(x, y, size, anchor, text));
        let (class, anchor) = (attribute("class", class), anchor.name());
        let anchor = if anchor == "start" { String::new() } else { attribute("text-anchor", anchor) };
        let text = escape(text);
        let _ = writeln!(self.svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\"{anchor}{class}>{text}</text>");
    }

    /// A straight line.
    pub fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) {
        let _ =
            writeln!(self.svg, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"{class}\"/>");
    }

    /// A rectangle, with a text that is shown where the pointer rests on it.
    pub fn rect(&mut self, Area(x, y, width, height): Area, class: &str, tip: &str) {
        let _ = write!(
            self.svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" class=\"{class}\""
        );
        self.end(tip, "rect");
    }

    /// A line through points, or the area in a row of them.
    pub fn shape(&mut self, points: &[(f64, f64)], element: &str, attributes: &str) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(self.svg, "<{element} points=\"{}\" {attributes}/>", points.join(" "));
    }

    /// A point, with a text that is shown where the pointer rests on it.
    pub fn marker(&mut self, (x, y): (f64, f64), style: Style, tip: &str) {
        let (ink, r, d) = (style.ink, MARKER, 2.0 * MARKER);
        let filled = format!("class=\"m f{ink}\"");
        let hollow = format!("class=\"m ground k{ink}\" stroke-width=\"1.6\"");
        let lines = format!("class=\"m k{ink}\" stroke-width=\"2\" fill=\"none\"");
        let (data, look) = match style.marker {
            Marker::Circle => (circle(x, y, r), filled),
            Marker::Ring => (circle(x, y, r), hollow),
            Marker::Square => (format!("M{:.1} {:.1}h{d:.1}v{d:.1}h-{d:.1}z", x - r, y - r), filled),
            Marker::Frame => (format!("M{:.1} {:.1}h{d:.1}v{d:.1}h-{d:.1}z", x - r, y - r), hollow),
            Marker::Triangle => (format!("M{x:.1} {:.1}l{:.1} {d:.1}h-{d:.1}z", y - r, r), filled),
            Marker::Down => (format!("M{x:.1} {:.1}l{:.1} -{d:.1}h-{d:.1}z", y + r, r), filled),
            Marker::Diamond => (format!("M{x:.1} {:.1}l{r:.1} {r:.1}l-{r:.1} {r:.1}l-{r:.1} -{r:.1}z", y - r), filled),
            Marker::Cross => (format!("M{:.1} {:.1}l{d:.1} {d:.1}m0 -{d:.1}l-{d:.1} {d:.1}", x - r, y - r), lines),
            Marker::Plus => (format!("M{:.1} {y:.1}h{d:.1}M{x:.1} {:.1}v{d:.1}", x - r, y - r), lines),
        };
        let _ = write!(self.svg, "<path d=\"{data}\" {look}");
        self.end(tip, "path");
    }

    fn end(&mut self, tip: &str, element: &str) {
        let _ = match tip {
            "" => writeln!(self.svg, "/>"),
            _ => writeln!(self.svg, "><title>{}</title></{element}>", escape(tip)),
        };
    }
}

fn circle(x: f64, y: f64, r: f64) -> String {
    format!("M{:.1} {y:.1}a{r} {r} 0 1 0 {d:.1} 0a{r} {r} 0 1 0 -{d:.1} 0z", x - r, d = 2.0 * r)
}

fn attribute(name: &str, value: &str) -> String {
    if value.is_empty() { String::new() } else { format!(" {name}=\"{value}\"") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_small() {
        use Marker::{Circle, Cross, Diamond, Down, Frame, Plus, Ring, Square, Triangle};
        for marker in [Circle, Ring, Square, Frame, Triangle, Down, Diamond, Cross, Plus] {
            let mut page = Page::default();
            page.marker((500.0, 600.0), Style { ink: 0, marker, is_dashed: false }, "");
            let data = page.svg.split("d=\"").nth(1).unwrap().split('"').next().unwrap();
            let numbers = data.split(|c: char| !c.is_ascii_digit() && c != '.').filter_map(|word| word.parse().ok());
            let is_near = |number: f64| [0.0, 500.0, 600.0].iter().any(|at| (number - at).abs() <= 2.0 * MARKER);
            assert!(numbers.clone().count() > 3 && numbers.into_iter().all(is_near), "{marker:?}: {data}");
        }
    }
}
