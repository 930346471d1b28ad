//! Lines with bands, or points with whiskers, and their names at the right end.

use super::axis::Axis;
use super::page::{Area, MARKER, Page};
use super::text::{Anchor, spread, width, wrap};
use super::{Point, SMALL, Series, above, below, foot, plain};

/// A plot's height when its names need no more.
const HEIGHT: f64 = 190.0;
/// From one name to the next.
const STEP: f64 = 13.6;
/// Fewer points are not joined: two make no trend.
const LINE_POINTS: usize = 3;
/// Between the plot and the names at its right.
const LEADER: f64 = 18.0;

/// Draws it in an area whose height may be 0: then it is as high as it needs; its lower end.
pub fn draw(page: &mut Page, area: Area, (x, y): (&Axis, &Axis), series: &[Series], reference: Option<f64>) -> f64 {
    let top = above(page, area, &y.label);
    let left = area.0 + y.ticks.iter().map(|(_, text)| width(text, SMALL)).fold(0.0, f64::max) + 8.0;
    let names = series.iter().map(|one| width(&one.name, SMALL)).fold(0.0, f64::max);
    let right = area.right() - if names > 0.0 { names + LEADER + 2.0 } else { 2.0 };
    let named = series.iter().filter(|one| !one.name.is_empty() && !one.points.is_empty()).count();
    let needed = HEIGHT.max(STEP * named as f64);
    let foot = foot(wrap(&x.label, SMALL, area.2).len());
    let height = if area.3 > 0.0 { (area.bottom() - foot - top).max(needed) } else { needed };
    let plot = Area(left, top, right - left, height);
    rungs(page, y, plot);
    let end = below(page, x, plot, (area.0, area.right()));
    page.line((left, top), (left, plot.bottom()), "a");
    if let Some(value) = reference {
        let y = plot.y(y.place(value));
        page.shape(&[(left, y), (right, y)], "polyline", "class=\"a\" stroke-width=\"1.6\" fill=\"none\"");
    }
    let drawn: Vec<&Series> = series.iter().filter(|one| !one.points.is_empty()).collect();
    for one in drawn.iter().filter(|one| one.points.len() >= LINE_POINTS) {
        band(page, one, x, y, plot);
    }
    for (number, one) in drawn.iter().enumerate() {
        // Whiskers of several series at one place stand side by side.
        let aside = (number as f64 - (drawn.len() - 1) as f64 / 2.0) * 5.0;
        curve(page, one, x, y, plot, if one.points.len() < LINE_POINTS { aside } else { 0.0 });
    }
    label_ends(page, &drawn, x, y, plot);
    end
}

/// The lines across the plot with their texts at the left; of texts that would touch only some are shown.
fn rungs(page: &mut Page, axis: &Axis, plot: Area) {
    let mut last = f64::INFINITY;
    for (value, text) in &axis.ticks {
        let y = plot.y(axis.place(*value));
        page.line((plot.0, y), (plot.right(), y), "g");
        if (last - y).abs() >= STEP {
            page.text((plot.0 - 6.0, y + 4.0), SMALL, Anchor::End, "", text);
            last = y;
        }
    }
}

/// The area between the values that a tenth and nine tenths are below.
fn band(page: &mut Page, series: &Series, x: &Axis, y: &Axis, plot: Area) {
    let Some(spreads) = series.points.iter().map(|point| point.spread).collect::<Option<Vec<_>>>() else { return };
    let at = |point: &Point, value: f64| (plot.x(x.place(point.x)), plot.y(y.place(value)));
    let low = series.points.iter().zip(&spreads).map(|(point, spread)| at(point, spread.0));
    let high = series.points.iter().zip(&spreads).map(|(point, spread)| at(point, spread.1));
    let outline: Vec<(f64, f64)> = low.chain(high.rev()).collect();
    page.shape(&outline, "polygon", &format!("class=\"f{}\" opacity=\"0.16\"", series.style.ink));
}

fn curve(page: &mut Page, series: &Series, x: &Axis, y: &Axis, plot: Area, aside: f64) {
    let at = |point: &Point, value: f64| (plot.x(x.place(point.x)) + aside, plot.y(y.place(value)));
    let ink = series.style.ink;
    if series.points.len() >= LINE_POINTS {
        let points: Vec<(f64, f64)> = series.points.iter().map(|point| at(point, point.y)).collect();
        let dash = if series.style.is_dashed { " stroke-dasharray=\"6 4\"" } else { "" };
        let look = format!("class=\"k{ink}\" fill=\"none\" stroke-width=\"2\" stroke-linejoin=\"round\"{dash}");
        page.shape(&points, "polyline", &look);
    }
    for point in &series.points {
        if let (Some((low, high)), true) = (point.spread, series.points.len() < LINE_POINTS) {
            page.line(at(point, low), at(point, high), &format!("k{ink}"));
        }
        page.marker(at(point, point.y), series.style, &tip(series, point, x, y));
        if y.is_beyond(point.y) {
            arrow(page, at(point, point.y), ink);
        }
    }
}

/// An arrow upwards above a marker at the upper end of the axis: the value is beyond it.
fn arrow(page: &mut Page, (x, y): (f64, f64), ink: usize) {
    let (foot, tip) = (y - MARKER - 1.0, y - MARKER - 6.0);
    let outline = [(x - 4.0, foot), (x, tip), (x + 4.0, foot)];
    page.shape(&outline, "polyline", &format!("class=\"beyond k{ink}\" fill=\"none\" stroke-width=\"1.8\""));
}

fn tip(series: &Series, point: &Point, x: &Axis, y: &Axis) -> String {
    let name = if series.name.is_empty() { String::new() } else { format!("{}: ", series.name) };
    let spread = point.spread.map_or(String::new(), |(low, high)| format!(" ({} to {})", short(low), short(high)));
    let beyond = if y.is_beyond(point.y) { ", beyond the axis" } else { "" };
    format!("{name}{} at {}{spread}, {}{beyond}", short(point.y), x.text(point.x), y.label)
}

/// A value with three digits that say something.
fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => plain(value.round()),
        size if size >= 10.0 => plain((value * 10.0).round() / 10.0),
        size if size >= 1.0 => plain((value * 100.0).round() / 100.0),
        _ => plain(value),
    }
}

fn label_ends(page: &mut Page, series: &[&Series], x: &Axis, y: &Axis, plot: Area) {
    let named: Vec<(&Series, (f64, f64))> = series
        .iter()
        .filter(|one| !one.name.is_empty())
        .filter_map(|one| {
            let last = one.points.iter().max_by(|a, b| a.x.total_cmp(&b.x))?;
            Some((*one, (plot.x(x.place(last.x)), plot.y(y.place(last.y)))))
        })
        .collect();
    let wanted: Vec<f64> = named.iter().map(|(_, (_, y))| *y).collect();
    let places = spread(&wanted, STEP, plot.1 + STEP / 2.0 - 2.0, plot.bottom() - 2.0);
    for ((one, end), place) in named.into_iter().zip(places) {
        let (ink, left) = (one.style.ink, plot.right() + LEADER);
        let leader = [(end.0 + MARKER + 2.0, end.1), (plot.right() + 1.0, end.1), (left - 3.0, place)];
        page.shape(&leader, "polyline", &format!("class=\"k{ink}\" fill=\"none\" stroke-width=\"0.7\""));
        page.text((left, place + 4.0), SMALL, Anchor::Start, &format!("t{ink}"), &one.name);
    }
}

/// What a screen reader says of it.
pub fn describe(x: &Axis, y: &Axis, series: &[Series]) -> String {
    let of = |one: &Series| {
        let ends = one.points.first().zip(one.points.last());
        let values = ends.map_or("nothing measured".to_owned(), |(first, last)| match one.points.len() {
            1 => format!("{} at {}", short(first.y), x.text(first.x)),
            _ => format!("{} at {}, {} at {}", short(first.y), x.text(first.x), short(last.y), x.text(last.x)),
        });
        if one.name.is_empty() { values } else { format!("{}: {values}", one.name) }
    };
    let all: Vec<String> = series.iter().map(of).collect();
    format!("{} by {}. {}. ", y.label, x.label, all.join("; "))
}
