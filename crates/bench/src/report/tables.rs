//! Tables: the values of a figure, and the rows of a result.

use serde_json::Value;

use crate::experiments::plot::{Figure, escape, plain};

/// The values of a figure as a table.
pub fn of_figure(figure: &Figure, max_rows: usize) -> String {
    let head = ["panel", "what", "at", "value", "10 %", "90 %", "unit"].map(str::to_owned);
    let number = |value: Option<f64>| value.map_or(String::new(), digits);
    let rows = figure.values().into_iter().map(|value| {
        vec![
            value.panel,
            value.name,
            value.at,
            digits(value.value),
            number(value.spread.map(|spread| spread.0)),
            number(value.spread.map(|spread| spread.1)),
            value.unit,
        ]
    });
    table("Values of the figure", &head, rows.collect(), max_rows)
}

/// The rows of a result as a table; a value inside an object has a column of its own.
pub fn of_rows(rows: &[Value], max_rows: usize) -> String {
    let flat: Vec<Vec<(String, String)>> = rows.iter().map(|row| flatten("", row)).collect();
    let mut head: Vec<String> = Vec::new();
    for (name, _) in flat.iter().flatten() {
        if !head.contains(name) {
            head.push(name.clone());
        }
    }
    let cells = |row: &Vec<(String, String)>| {
        let of = |name: &String| row.iter().find(|(other, _)| other == name).map(|(_, text)| text.clone());
        head.iter().map(|name| of(name).unwrap_or_default()).collect()
    };
    let rows = flat.iter().map(cells).collect();
    table("Rows of the result", &head, rows, max_rows)
}

fn flatten(prefix: &str, value: &Value) -> Vec<(String, String)> {
    match value {
        Value::Object(fields) => {
            let name = |field: &str| if prefix.is_empty() { field.to_owned() } else { format!("{prefix}.{field}") };
            fields.iter().flat_map(|(field, value)| flatten(&name(field), value)).collect()
        }
        Value::Null => vec![(prefix.to_owned(), "–".to_owned())],
        Value::Number(number) => vec![(prefix.to_owned(), number.as_f64().map_or_else(|| number.to_string(), digits))],
        Value::String(text) => vec![(prefix.to_owned(), text.clone())],
        other => vec![(prefix.to_owned(), other.to_string())],
    }
}

/// A number with four digits that say something.
fn digits(value: f64) -> String {
    let size = value.abs();
    let scale = match size {
        size if size >= 1000.0 || value.fract() == 0.0 => 1.0,
        size if size >= 100.0 => 10.0,
        size if size >= 1.0 => 1000.0,
        _ => 10_000.0,
    };
    plain((value * scale).round() / scale)
}

fn table(caption: &str, head: &[String], rows: Vec<Vec<String>>, max_rows: usize) -> String {
    let cells = |element: &str, cells: &[String]| -> String {
        let cell = |text: &String| {
            let is_number =
                text.starts_with(|c: char| c.is_ascii_digit() || c == '-') && !text.contains(char::is_alphabetic);
            let class = if is_number { " class=\"n\"" } else { "" };
            let scope = if element == "th" { " scope=\"col\"" } else { "" };
            format!("<{element}{scope}{class}>{}</{element}>", escape(text))
        };
        cells.iter().map(cell).collect()
    };
    let left_out = rows.len().saturating_sub(max_rows);
    let body: String = rows.iter().take(max_rows).map(|row| format!("<tr>{}</tr>\n", cells("td", row))).collect();
    let more = if left_out > 0 { format!("<p>{left_out} more rows are in the file.</p>") } else { String::new() };
    format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table><caption>{caption}</caption>\
         <thead><tr>{}</tr></thead><tbody>\n{body}</tbody></table></div>{more}",
        cells("th", head)
    )
}
