//! Bars of the sides of each line, as one SVG file: medians, and a stroke from the least to the most of the rounds. The bars of a line share a scale.

use super::Plan;
use super::report::{host, shown_rate};
use crate::Result;
use serde_json::Value;
use std::fmt::Write;
use std::path::Path;

const WIDTH: f64 = 820.0;
/// Where bars begin, and how long the longest is.
const BARS: (f64, f64) = (210.0, 330.0);
/// The height of a bar, and of what stands between two.
const BAR: f64 = 15.0;
const GAP: f64 = 3.0;
const STYLE: &str = "text{font:12px system-ui,'DejaVu Sans',Arial,sans-serif;fill:#1a1a1a}.b{font-weight:600;font-size:13px}\
    .s{fill:#555}.ground{fill:#fff}.ours{fill:#0072b2}.peer{fill:#9a9a9a}.w{stroke:#1a1a1a}\
    @media(prefers-color-scheme:dark){text{fill:#e8e8e8}.s{fill:#b0b6be}.ground{fill:#12161c}.ours{fill:#4aa3df}\
    .peer{fill:#6d7580}.w{stroke:#e8e8e8}}";

/// What stands above the bars.
pub struct Picture {
    groups: Vec<(String, String)>,
    note: String,
}

impl Picture {
    /// A picture of groups, by name and by what they are about.
    pub fn new(groups: &[(&str, &str)], plan: &Plan) -> Picture {
        let host = host();
        let text = |name: &str| host[name].as_str().unwrap_or_default().to_owned();
        let quick = if plan.quick { "A quick run, whose figures mean nothing · " } else { "" };
        let note = format!(
            "{quick}Medians of {} rounds; the stroke goes from the least to the most · Linux {}, {} processors",
            plan.rounds,
            text("kernel"),
            host["cores"]
        );
        Picture { groups: groups.iter().map(|(name, about)| (name.to_string(), about.to_string())).collect(), note }
    }

    /// Draws the results of a [`Report`](super::report::Report) into `file`.
    pub fn write(&self, results: &[Value], file: &Path) -> Result<()> {
        let svg = self.draw(results);
        std::fs::write(file, svg).map_err(|error| format!("{}: {error}", file.display()))?;
        println!("\nThe picture: {}", file.display());
        Ok(())
    }

    fn draw(&self, results: &[Value]) -> String {
        let (mut body, mut y) = (String::new(), 52.0);
        for (name, about) in &self.groups {
            let of_group: Vec<&Value> = results.iter().filter(|row| group_and_line(row).0 == name).collect();
            if of_group.is_empty() {
                continue;
            }
            y += 14.0;
            let _ = write!(
                body,
                "<text class='b' x='16' y='{y}'>{name}</text><text class='s' x='{}' y='{y}'>{about}</text>",
                BARS.0 + 150.0
            );
            y += 8.0;
            for rows in of_group.chunk_by(|a, b| a["line"] == b["line"]) {
                y = draw_line(&mut body, y, rows);
            }
            y += 6.0;
        }
        let height = y + 10.0;
        format!(
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' role='img'>\
             <title>Spile beside its peers on a real file</title><style>{STYLE}</style>\
             <rect class='ground' width='{WIDTH}' height='{height}'/>\
             <text class='b' x='16' y='22'>Spile beside qemu-nbd, nbdkit and qemu-storage-daemon: longer is better</text>\
             <text class='s' x='16' y='40'>{}</text>{body}</svg>\n",
            self.note
        )
    }
}

fn group_and_line(row: &Value) -> (&str, &str) {
    row["line"].as_str().and_then(|line| line.split_once('/')).unwrap_or_default()
}

/// Draws the sides of a line; answers where the next one begins.
fn draw_line(body: &mut String, top: f64, rows: &[&Value]) -> f64 {
    let is_bandwidth = rows[0]["unit"] == "bytes_per_s";
    let rounds = |row: &Value| -> Vec<f64> {
        let field = if is_bandwidth { "bytes_per_s" } else { "iops" };
        row["rounds"].as_array().into_iter().flatten().filter_map(|round| round[field].as_f64()).collect()
    };
    let most = rows.iter().flat_map(|row| rounds(row)).fold(1.0, f64::max);
    let x_of = |rate: f64| BARS.0 + BARS.1 * rate / most;
    let line = group_and_line(rows[0]).1.trim_end_matches(" × 1");
    let _ = write!(body, "<text x='16' y='{}'>{line}</text>", top + 12.0);
    let mut y = top;
    for row in rows {
        let (name, rate) = (row["side"].as_str().unwrap_or_default(), row["median_rate"].as_f64().unwrap_or(0.0));
        let class = if name.starts_with("spile") { "ours" } else { "peer" };
        let rounds = rounds(row);
        let (least, most) = (rounds.iter().copied().fold(rate, f64::min), rounds.iter().copied().fold(rate, f64::max));
        let unit = if is_bandwidth { "" } else { " IOPS" };
        let (middle, text) = (y + BAR / 2.0, y + BAR - 3.0);
        let _ = write!(
            body,
            "<rect class='{class}' x='{}' y='{y}' width='{:.1}' height='{BAR}'/>\
             <path class='w' d='M{:.1} {middle}H{:.1}'/>\
             <text x='{:.1}' y='{text}'>{name} <tspan class='s'>{}{unit}</tspan></text>",
            BARS.0,
            x_of(rate) - BARS.0,
            x_of(least),
            x_of(most),
            x_of(most) + 6.0,
            shown_rate(rate, is_bandwidth),
        );
        y += BAR + GAP;
    }
    y + 6.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_longest_bar_is_the_fastest_side_and_groups_without_figures_are_left_out() {
        let row = |side, rate: f64| {
            json!({ "line": "nbd/randread 4k depth 32 × 1", "side": side, "unit": "iops", "median_rate": rate,
                "rounds": [{ "iops": rate }] })
        };
        let groups = [("nbd", "a file"), ("vhost", "nothing")].map(|(name, about)| (name.to_owned(), about.to_owned()));
        let picture = Picture { groups: groups.into(), note: String::new() };
        let svg = picture.draw(&[row("spile", 200e3), row("qemu-nbd", 50e3)]);
        assert!(svg.contains("class='ours' x='210' y='74' width='330.0'"), "{svg}");
        assert!(svg.contains("class='peer' x='210' y='92' width='82.5'"), "{svg}");
        assert!(svg.contains("200.0 k IOPS") && !svg.contains("vhost"), "{svg}");
    }
}
