//! What a figure shows, as numbers: for the table behind it.

use super::axis::Axis;
use super::{Bar, Figure, Heat, Marks, Panel, Series};

/// One value of a figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// The title of its panel.
    pub panel: String,
    /// The name of its line or bar, or its row in a heat map.
    pub name: String,
    /// Where it is on the axis to the right, or which part of a bar it is.
    pub at: String,
    /// The value.
    pub value: f64,
    /// A tenth and nine tenths of what was measured are below these.
    pub spread: Option<(f64, f64)>,
    /// What the value is, with its unit.
    pub unit: String,
}

impl Figure {
    /// All values, panel by panel.
    pub fn values(&self) -> Vec<Value> {
        let of = |panel: &Panel| match &panel.marks {
            Marks::Series { x, y, series, .. } => series.iter().flat_map(|one| of_series(panel, one, x, y)).collect(),
            Marks::Bars { x, bars, .. } => bars.iter().flat_map(|bar| self.of_bar(panel, bar, x)).collect(),
            Marks::Heat(heat) => of_heat(panel, heat),
        };
        self.panels.iter().flat_map(|panel: &Panel| -> Vec<Value> { of(panel) }).collect()
    }

    fn of_bar(&self, panel: &Panel, bar: &Bar, x: &Axis) -> Vec<Value> {
        let part = |(value, style): &(f64, super::Style)| Value {
            panel: panel.title.clone(),
            name: bar.name.clone(),
            at: self.keys.iter().find(|(_, key)| key == style).map_or(String::new(), |(name, _)| name.clone()),
            value: *value,
            spread: bar.spread,
            unit: x.label.clone(),
        };
        bar.parts.iter().map(part).collect()
    }
}

fn of_series(panel: &Panel, series: &Series, x: &Axis, y: &Axis) -> Vec<Value> {
    let value = |point: &super::Point| Value {
        panel: panel.title.clone(),
        name: series.name.clone(),
        at: format!("{} ({})", x.text(point.x), x.label),
        value: point.y,
        spread: point.spread,
        unit: y.label.clone(),
    };
    series.points.iter().map(value).collect()
}

fn of_heat(panel: &Panel, heat: &Heat) -> Vec<Value> {
    let mut values = Vec::new();
    for (row, line) in heat.rows.iter().zip(&heat.values) {
        for (column, value) in heat.columns.iter().zip(line) {
            values.extend(value.map(|value| Value {
                panel: panel.title.clone(),
                name: row.clone(),
                at: column.clone(),
                value,
                spread: None,
                unit: heat.value.clone(),
            }));
        }
    }
    values
}
