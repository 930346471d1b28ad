//! The picture: a head, the list of disks or a panel, and a line of keys. It fits any terminal, down to a single line.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::app::{App, View};
use super::model::{Column, DiskRow};
use super::panels;
use super::text::columns;
use crate::cli::stat::number;

/// The width of a column with a number, with the blank before it.
const CELL: usize = 8;
/// The bounds of the column with names.
const NAME: std::ops::RangeInclusive<usize> = 8..=28;
/// The bounds of the trend.
const TREND: std::ops::RangeInclusive<usize> = 6..=32;
/// A terminal of so many columns has room for the trend.
const WIDE: usize = 60;
/// The columns by how much they matter, on a terminal that is too narrow for all.
const BY_WEIGHT: [Column; 10] = [
    Column::Reads,
    Column::Writes,
    Column::Await,
    Column::FrontQueue,
    Column::P99,
    Column::ReadBytes,
    Column::WriteBytes,
    Column::StoreQueue,
    Column::P999,
    Column::P50,
];

/// Draws all.
pub fn draw(app: &App, frame: &mut Frame<'_>) {
    let area = frame.area();
    let lines = match area.height {
        0 => Vec::new(),
        // Where there is no room for more, the list or the panel has it.
        1..=3 => body(app, area),
        _ => {
            let inner = Rect { height: area.height - 2, ..area };
            let mut lines = vec![head(app, area.width.into())];
            lines.extend(body(app, inner));
            lines.resize(usize::from(area.height) - 1, Line::default());
            lines.push(foot(app));
            lines
        }
    };
    frame.render_widget(Paragraph::new(lines), area);
}

fn body(app: &App, area: Rect) -> Vec<Line<'static>> {
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let mut lines = match &app.view {
        View::List => list(app, width, height),
        View::Help => panels::help(),
        View::Layers(key) => panels::layers(app, key, width),
        View::Heat(key) => panels::heat(app, key, width, height),
    };
    if app.view != View::List {
        let hidden = app.scroll.min(lines.len().saturating_sub(height));
        lines.drain(..hidden);
    }
    lines.truncate(height);
    lines
}

/// How many disks there are, and what does not answer.
fn head(app: &App, width: usize) -> Line<'static> {
    let (servers, disks) = app.model.counts();
    let silent = app.model.silent().count();
    let filter = match app.model.filter.as_str() {
        "" => String::new(),
        filter => format!(", filter {filter:?}: {}", app.model.shown().len()),
    };
    let (disks, servers) = (number_of(disks, "disk"), number_of(servers, "server"));
    let text = format!("spile top: {disks} of {servers}, every {} s{filter}", app.interval.as_secs_f64());
    let mut spans =
        vec![Span::styled(app.ink.fitted(&text, columns(&text).min(width)), Style::new().add_modifier(Modifier::BOLD))];
    if silent > 0 {
        spans.push(Span::styled(format!("  {silent} without an answer"), app.ink.style(Color::Red)));
    }
    if app.paused {
        spans.push(Span::styled("  held", app.ink.reversed()));
    }
    Line::from(spans)
}

/// `1 disk`, `2 disks`.
fn number_of(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

fn foot(app: &App) -> Line<'static> {
    if app.typing {
        return Line::from(format!("/{}_  Enter: keep it, Esc: clear it", app.model.filter));
    }
    let text = match app.view {
        View::List => "q end  ? keys  <> sort  r reverse  / filter  l layers  h heat map  Space hold",
        _ => "Esc back  q end  ? keys  l layers  h heat map  Space hold",
    };
    Line::from(Span::styled(text, app.ink.style(Color::DarkGray)))
}

/// The list: its head, and as many disks as there is room for, the chosen one among them.
fn list(app: &App, width: usize, height: usize) -> Vec<Line<'static>> {
    let shown = app.model.shown();
    let longest = shown.iter().map(|(_, row)| columns(&row.disk.name)).max().unwrap_or(0);
    let layout = Layout::new(width, longest);
    let mut lines = if height > 2 { vec![layout.head(app)] } else { Vec::new() };
    let room = height - lines.len();
    let at = app.place();
    let first = (at + 1).saturating_sub(room);
    let rows = shown.iter().enumerate().skip(first).take(room);
    lines.extend(rows.map(|(index, (_, row))| {
        let line = layout.row(app, row);
        if index == at { line.patch_style(app.ink.reversed()) } else { line }
    }));
    for (socket, why) in app.model.silent() {
        let line = format!("{}: {why}", socket.display());
        lines.push(Line::from(Span::styled(app.ink.fitted(&line, width), app.ink.style(Color::Red))));
    }
    if shown.is_empty() && app.model.silent().next().is_none() {
        let (_, disks) = app.model.counts();
        lines.push(Line::from(if disks == 0 { "no server on this host has a disk" } else { "no disk has this text" }));
    }
    lines
}

/// Which columns a terminal has room for.
struct Layout {
    width: usize,
    name: usize,
    columns: Vec<Column>,
    trend: usize,
}

impl Layout {
    fn new(width: usize, longest_name: usize) -> Self {
        // On a narrow terminal names get a third of it.
        let widest = (width / 3).clamp(*NAME.start(), *NAME.end());
        let name = longest_name.clamp(*NAME.start(), widest).min(width);
        // The trend is worth more than the last numbers.
        let reserved = if width >= WIDE { TREND.start() + 1 } else { 0 };
        let room = (width - name).saturating_sub(reserved) / CELL;
        let chosen = &BY_WEIGHT[..room.min(BY_WEIGHT.len())];
        let columns: Vec<_> = Column::ALL.into_iter().filter(|column| chosen.contains(column)).collect();
        let left = width - name - columns.len() * CELL;
        let trend = if left > *TREND.start() { (left - 1).min(*TREND.end()) } else { 0 };
        Self { width, name, columns, trend }
    }

    fn head(&self, app: &App) -> Line<'static> {
        let mark = |column: Column, text: &str| match (app.model.sort == column, app.model.descending) {
            (false, _) => text.to_owned(),
            (true, true) => format!("{text}v"),
            (true, false) => format!("{text}^"),
        };
        let name = app.ink.fitted(&mark(Column::Name, "NAME"), self.name);
        let cells = self.columns.iter().map(|column| format!("{:>CELL$}", mark(*column, title(*column))));
        let trend = if self.trend > 0 { " TREND" } else { "" };
        let text = format!("{name}{}{trend}", cells.collect::<String>());
        Line::from(Span::styled(app.ink.fitted(&text, self.width), app.ink.reversed()))
    }

    fn row(&self, app: &App, row: &DiskRow) -> Line<'static> {
        let (ink, note) = (app.ink, row.note());
        let name = Span::raw(ink.fitted(&row.disk.name, self.name));
        let Some(figures) = &row.figures else {
            let room = (self.width - self.name).saturating_sub(1);
            return Line::from(vec![
                name,
                Span::styled(format!(" {}", ink.fitted(&note, room)), ink.style(Color::Yellow)),
            ]);
        };
        let cell = |column: &Column| {
            let value = column.value(figures);
            let text = match column {
                Column::Await | Column::P50 | Column::P99 | Column::P999 => ink.time(value),
                _ => value.map_or_else(|| "-".to_owned(), number),
            };
            format!("{text:>CELL$}")
        };
        let cells: String = self.columns.iter().map(cell).collect();
        let trend = match (self.trend, note.as_str()) {
            (0, _) => Span::raw(""),
            (width, "") => {
                Span::styled(format!(" {}", ink.sparkline(row.history.rates(width))), ink.style(Color::Cyan))
            }
            (width, note) => Span::styled(format!(" {}", ink.fitted(note, width)), ink.style(Color::Yellow)),
        };
        Line::from(vec![name, Span::raw(cells), trend])
    }
}

/// The head of a column.
pub fn title(column: Column) -> &'static str {
    match column {
        Column::Name => "NAME",
        Column::Reads => "r/s",
        Column::Writes => "w/s",
        Column::ReadBytes => "rMB/s",
        Column::WriteBytes => "wMB/s",
        Column::Await => "await",
        Column::FrontQueue => "aqu-sz",
        Column::StoreQueue => "store-q",
        Column::P50 => "p50",
        Column::P99 => "p99",
        Column::P999 => "p99.9",
    }
}
