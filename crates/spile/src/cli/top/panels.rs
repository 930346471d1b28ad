//! What one disk does, as the whole picture: its layers, or its heat map; and the help.

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use spile_server::serving::api::rates::LayerRates;

use super::app::App;
use super::history::{ROWS, row_start_ns};
use super::keys::HELP;
use super::model::{DiskRow, Key};
use crate::cli::stat::{name_of, number, remarks};
use crate::log::printable;

/// The widest name of a layer.
const NAME: usize = 22;
/// The width of a column with a number.
const CELL: usize = 8;
/// The column of a heat map that says the latency of a row.
const LABEL: usize = 9;

/// The keys and the columns.
pub fn help() -> Vec<Line<'static>> {
    let keys = HELP.iter().map(|(keys, what)| Line::from(format!("  {keys:<16} {what}")));
    let columns = [
        "",
        "aqu-sz   requests in flight at the front, on average: integrated over the interval",
        "store-q  the same at the store, or at the image where stores do not count",
        "await    the average latency of requests at the front; p50, p99, p99.9: quantiles",
        "MB       10^6 bytes",
    ];
    let title = Line::from(Span::styled("Keys", Style::new().add_modifier(Modifier::BOLD)));
    std::iter::once(title).chain(keys).chain(columns.map(Line::from)).collect()
}

/// The disk of a panel, or the line that says why there is nothing to show.
fn disk<'a>(app: &'a App, key: &Key) -> Result<&'a DiskRow, Vec<Line<'static>>> {
    app.model.find(key).ok_or_else(|| match key.1.as_str() {
        "" => vec![Line::from("no disk is chosen")],
        name => vec![Line::from(printable(&format!("the disk {name:?} has gone")))],
    })
}

fn title(app: &App, row: &DiskRow, width: usize) -> Line<'static> {
    let text = format!("{}: {}, process {}", row.disk.name, row.disk.path, row.disk.pid);
    Line::from(Span::styled(app.ink.fitted(&text, width), Style::new().add_modifier(Modifier::BOLD)))
}

/// Queues and latencies of each layer that a request passes, side by side, and what the layers count.
pub fn layers(app: &App, key: &Key, width: usize) -> Vec<Line<'static>> {
    let row = match disk(app, key) {
        Ok(row) => row,
        Err(lines) => return lines,
    };
    let mut lines = vec![title(app, row, width)];
    let Some(interval) = &row.interval else {
        lines.push(Line::from(Span::styled(row.note(), app.ink.style(Color::Yellow))));
        return lines;
    };
    let layers = interval.rates().layers;
    let heads = ["aqu-sz", "mean", "p50", "p99", "p99.9", "r/s", "w/s", "flush/s", "rMB/s", "wMB/s"];
    let heads: String = heads.iter().map(|head| format!("{head:>CELL$}")).collect();
    lines.push(Line::from(Span::styled(
        app.ink.fitted(&format!("{:<NAME$}{heads}", "LAYER"), width),
        app.ink.reversed(),
    )));
    lines.extend(layers.iter().map(|layer| layer_line(app, layer)));
    lines.push(Line::default());
    lines.extend(layers.iter().flat_map(remarks).map(|remark| app.ink.line(&remark)));
    lines
}

fn layer_line(app: &App, layer: &LayerRates) -> Line<'static> {
    let times = [layer.latency_mean_us, layer.latency_p50_us, layer.latency_p99_us, layer.latency_p999_us];
    let rates = [layer.reads_per_s, layer.writes_per_s, layer.flushes_per_s];
    let bytes = [layer.read_bytes_per_s / 1e6, layer.write_bytes_per_s / 1e6];
    let numbers = rates.into_iter().chain(bytes).map(number);
    let cells = std::iter::once(number(layer.queue_size())).chain(times.map(|time| app.ink.time(time))).chain(numbers);
    let cells: String = cells.map(|cell| format!("{cell:>CELL$}")).collect();
    Line::from(format!("{}{cells}", app.ink.fitted(&name_of(layer), NAME)))
}

/// Latencies over time: a column for each interval, the newest at the right, and a row for each latency. The darker, the more requests.
pub fn heat(app: &App, key: &Key, width: usize, height: usize) -> Vec<Line<'static>> {
    let row = match disk(app, key) {
        Ok(row) => row,
        Err(lines) => return lines,
    };
    let mut lines = vec![title(app, row, width)];
    let map = HeatMap::new(row, width.saturating_sub(LABEL + 1), height.saturating_sub(2));
    let Some(map) = map else {
        lines.push(Line::from("no request has ended since this began"));
        return lines;
    };
    lines.extend(map.rows.iter().rev().map(|(start_ns, counts)| {
        let label = app.ink.time(Some(*start_ns as f64 / 1e3));
        let cells = counts.iter().map(|count| app.ink.shade(*count as f64 / map.most as f64));
        Line::from_iter([Span::raw(format!("{label:>LABEL$} "))].into_iter().chain(cells))
    }));
    let ago = format!("-{:.0} s", app.interval.as_secs_f64() * map.columns as f64);
    let gap = " ".repeat(map.columns.saturating_sub(ago.len() + "now".len()).max(1));
    let scale = format!("{:>LABEL$} {ago}{gap}now    ", "");
    let most = if map.most == 1 { " = 1 request".to_owned() } else { format!(" = {} requests", map.most) };
    lines.push(Line::from(vec![Span::raw(scale), app.ink.shade(1.0), Span::raw(most)]));
    lines
}

/// The counts of a heat map.
struct HeatMap {
    /// From the shortest latency on: where the row begins, in nanoseconds, and the requests of each interval.
    rows: Vec<(u64, Vec<u64>)>,
    /// The most requests of any place.
    most: u64,
    columns: usize,
}

impl HeatMap {
    /// `None` when there was no request.
    fn new(disk: &DiskRow, width: usize, height: usize) -> Option<Self> {
        let intervals = disk.history.latencies(width);
        let rows = intervals.clone().flatten().map(|(row, _)| usize::from(*row));
        let (first, last) = (rows.clone().min()?, rows.max()?);
        // Where the terminal is too low, neighbours share a row.
        let step = (last - first + 1).div_ceil(height.max(1)).max(1);
        let columns = intervals.clone().count();
        let mut counts = vec![vec![0; columns]; (last - first) / step + 1];
        for (column, interval) in intervals.enumerate() {
            for (row, count) in interval {
                counts[(usize::from(*row) - first) / step][column] += count;
            }
        }
        let most = counts.iter().flatten().copied().max().unwrap_or(0);
        let starts = (first..ROWS).step_by(step).map(row_start_ns);
        Some(Self { rows: starts.zip(counts).collect(), most: most.max(1), columns })
    }
}
