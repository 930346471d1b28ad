//! Bars to the right, each with its name before it: names of paths are long.

use super::axis::Axis;
use super::page::{Area, Page};
use super::text::{Anchor, width};
use super::{Bar, LEADING, SMALL, below};

/// From one bar to the next, and a bar's breadth.
const STEP: f64 = 21.0;
const BREADTH: f64 = 14.0;

/// Draws it, as high as it needs; its lower end.
pub fn draw(page: &mut Page, area: Area, axis: &Axis, bars: &[Bar], reference: Option<f64>) -> f64 {
    let names = bars.iter().map(|bar| width(&bar.name, SMALL)).fold(0.0, f64::max);
    let notes = bars.iter().map(|bar| width(&bar.note, SMALL)).fold(0.0, f64::max);
    let (left, top) = (area.0 + names + 8.0, area.1 + SMALL * LEADING / 2.0);
    let plot = Area(left, top, area.right() - notes - 4.0 - left, STEP * bars.len() as f64);
    let end = below(page, axis, plot, (area.0, area.right()));
    for (number, bar) in bars.iter().enumerate() {
        let middle = top + (number as f64 + 0.5) * STEP;
        page.text((left - 6.0, middle + 4.0), SMALL, Anchor::End, "", &bar.name);
        one(page, bar, axis, plot, (middle, reference));
    }
    let zero = plot.x(axis.place(0.0));
    page.line((zero, top), (zero, plot.bottom()), "a");
    if let Some(value) = reference {
        let x = plot.x(axis.place(value));
        page.shape(&[(x, top), (x, plot.bottom())], "polyline", "class=\"a\" stroke-width=\"1.6\" fill=\"none\"");
    }
    end
}

/// Draws a bar around the height `middle`. Its note stands behind it, and clear of the line at `reference`.
fn one(page: &mut Page, bar: &Bar, axis: &Axis, plot: Area, (middle, reference): (f64, Option<f64>)) {
    let (mut sum, mut from) = (0.0, plot.x(axis.place(0.0)));
    for (value, style) in &bar.parts {
        sum += value;
        let to = plot.x(axis.place(sum)).max(from);
        let tip = if bar.note.is_empty() { bar.name.clone() } else { format!("{}: {}", bar.name, bar.note) };
        page.rect(Area(from, middle - BREADTH / 2.0, to - from, BREADTH), &format!("m f{}", style.ink), &tip);
        from = to;
    }
    if let Some((low, high)) = bar.spread {
        let at = |value: f64| plot.x(axis.place(value));
        let ends = [at(low), at(high)];
        page.line((ends[0], middle), (ends[1], middle), "a");
        ends.into_iter().for_each(|x| page.line((x, middle - 4.0), (x, middle + 4.0), "a"));
        from = from.max(ends[1]);
    }
    let line = reference.map(|value| plot.x(axis.place(value)));
    let is_crossed = |x: &f64| from - 1.0 < *x && *x < from + 6.0 + width(&bar.note, SMALL);
    let from = line.filter(is_crossed).unwrap_or(from);
    page.text((from + 4.0, middle + 4.0), SMALL, Anchor::Start, "u", &bar.note);
}

/// What a screen reader says of it.
pub fn describe(axis: &Axis, bars: &[Bar]) -> String {
    let of = |bar: &Bar| {
        let sum: f64 = bar.parts.iter().map(|(value, _)| value).sum();
        let value = if bar.note.is_empty() { format!("{sum:.2}") } else { bar.note.clone() };
        format!("{} {value}", bar.name)
    };
    let all: Vec<String> = bars.iter().map(of).collect();
    format!("{}. {}. ", axis.label, all.join("; "))
}
