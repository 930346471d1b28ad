//! A heat map: values as steps of one colour, from little to much.

use super::page::{Area, Page};
use super::style::HEAT;
use super::text::{Anchor, width};
use super::{Heat, LEADING, SMALL, above, plain, wrap};

/// A cell's height.
const CELL: f64 = 19.0;

/// Draws it, as high as it needs; its lower end.
pub fn draw(page: &mut Page, area: Area, heat: &Heat) -> f64 {
    let top = above(page, area, &heat.y);
    let left = area.0 + heat.rows.iter().map(|row| width(row, SMALL)).fold(0.0, f64::max) + 8.0;
    // The text of the last column may be wider than its cell.
    let overhang = heat.columns.last().map_or(0.0, |text| width(text, SMALL) / 2.0);
    let step = (area.right() - overhang - left) / heat.columns.len().max(1) as f64;
    let bottom = top + CELL * heat.rows.len() as f64;
    let most = heat.values.iter().flatten().flatten().copied().fold(0.0, f64::max);
    for (number, row) in heat.rows.iter().enumerate() {
        let y = bottom - CELL * (number + 1) as f64;
        page.text((left - 6.0, y + CELL / 2.0 + 4.0), SMALL, Anchor::End, "", row);
        let values = heat.values.get(number).map_or(&[][..], Vec::as_slice);
        for (column, value) in values.iter().enumerate() {
            let Some(value) = value else { continue };
            let place = Area(left + column as f64 * step, y, step - 1.0, CELL - 1.0);
            let name = heat.columns.get(column).map_or("", String::as_str);
            let tip = format!("{name}, {row}: {} {}", plain(*value), heat.value);
            page.rect(place, &format!("m h{}", class(*value, most)), &tip);
        }
    }
    columns(page, heat, (left, bottom), step);
    let lines = wrap(&heat.x, SMALL, area.2);
    for (number, line) in lines.iter().enumerate() {
        let y = bottom + 31.0 + number as f64 * SMALL * LEADING;
        page.text((area.0 + area.2 / 2.0, y), SMALL, Anchor::Middle, "u", line);
    }
    scale(page, heat, (area.0, bottom + 24.0 + lines.len() as f64 * SMALL * LEADING), area.2, most)
}

fn columns(page: &mut Page, heat: &Heat, (left, bottom): (f64, f64), step: f64) {
    let widest = heat.columns.iter().map(|text| width(text, SMALL)).fold(0.0, f64::max);
    let stride = ((widest + 6.0) / step).ceil().max(1.0) as usize;
    for (number, text) in heat.columns.iter().enumerate().step_by(stride) {
        let x = left + (number as f64 + 0.5) * step;
        page.text((x, bottom + 14.0), SMALL, Anchor::Middle, "", text);
    }
}

/// What the steps mean, from 0 to the greatest value; its lower end.
fn scale(page: &mut Page, heat: &Heat, (left, top): (f64, f64), room: f64, most: f64) -> f64 {
    let most = format!("{} {}", plain(most), heat.value);
    let from = left + width("0", SMALL) + 6.0;
    page.text((left, top + 11.0), SMALL, Anchor::Start, "", "0");
    for step in 0..HEAT.len() {
        page.rect(Area(from + step as f64 * 16.0, top, 16.0, 12.0), &format!("h{step}"), "");
    }
    let x = from + HEAT.len() as f64 * 16.0 + 6.0;
    let lines = wrap(&most, SMALL, room - (x - left));
    for (number, line) in lines.iter().enumerate() {
        let y = top + 11.0 + number as f64 * SMALL * LEADING;
        page.text((x, y), SMALL, Anchor::Start, "", line);
    }
    top + 6.0 + lines.len().max(1) as f64 * SMALL * LEADING
}

fn class(value: f64, most: f64) -> usize {
    let steps = HEAT.len();
    if most > 0.0 { ((value / most * steps as f64) as usize).min(steps - 1) } else { 0 }
}

/// What a screen reader says of it.
pub fn describe(heat: &Heat) -> String {
    let cells = heat.values.iter().enumerate().flat_map(|(row, values)| {
        values.iter().enumerate().filter_map(move |(column, value)| Some((row, column, (*value)?)))
    });
    let most = cells.max_by(|a, b| a.2.total_cmp(&b.2)).map_or(String::new(), |(row, column, value)| {
        let name = |names: &[String], number: usize| names.get(number).cloned().unwrap_or_default();
        format!("Most: {} at {}, {}. ", plain(value), name(&heat.columns, column), name(&heat.rows, row))
    });
    format!("{} by {} and {}. {most}", heat.value, heat.x, heat.y)
}
