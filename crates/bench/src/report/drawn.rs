//! What is drawn and said of a result: one table by the experiment's name.

use serde::de::DeserializeOwned;
use serde_json::{Error, Value};

use super::ratios;
use super::results::Known;
use crate::experiments::findings::found_here;
use crate::experiments::{Figures, Outcome, aggregate, density, depth, geometry, layers, paths, shape, tune, warmup};

/// A part of the page: one result.
pub struct Section<'a> {
    /// The file and what is in it.
    pub known: &'a Known,
    /// Its figures and their names.
    pub figures: Figures,
    /// Why there are none, where that is so.
    pub why_none: Option<String>,
    /// What was found here, in sentences.
    pub found: Vec<String>,
}

/// Draws the figures of a result.
type Draw = fn(Value) -> Result<(Figures, Vec<String>), Error>;

/// How each experiment is drawn. An experiment that is not here has its rows in a table.
const DRAWN: &[(&str, Draw)] = &[
    ("paths", |json| with(json, paths::figures, paths::found)),
    ("aggregate", |json| with(json, aggregate::figures, aggregate::found)),
    ("depth", |json| with(json, depth::figures, nothing)),
    ("shape", |json| with(json, shape::figures, shape::found)),
    ("tune", |json| with(json, tune::figures, tune::found)),
    ("density", |json| with(json, density::figures, nothing)),
    ("layers", |json| with(json, layers::figures, nothing)),
    ("geometry", |json| with(json, geometry::figures, nothing)),
    ("warmup", |json| with(json, warmup::figures, nothing)),
    ("exchange", |json| with(json, ratios::exchange, nothing)),
    ("crowd", |json| with(json, ratios::crowd, nothing)),
    ("hung", |json| with(json, ratios::hung, nothing)),
];

fn with<P: DeserializeOwned, R: DeserializeOwned>(
    json: Value,
    figures: fn(&Outcome<P, R>) -> Figures,
    found: fn(&Outcome<P, R>) -> Vec<String>,
) -> Result<(Figures, Vec<String>), Error> {
    let outcome: Outcome<P, R> = serde_json::from_value(json)?;
    Ok((figures(&outcome), found(&outcome)))
}

fn nothing<O>(_: &O) -> Vec<String> {
    Vec::new()
}

impl<'a> Section<'a> {
    /// Draws what can be drawn of a result.
    pub fn new(known: &'a Known) -> Self {
        let draw = DRAWN.iter().find(|(name, _)| *name == known.experiment).map(|(_, draw)| draw);
        let drawn = draw.map(|draw| draw(known.json.clone()));
        let (figures, found, why_none) = match drawn {
            Some(Ok((figures, found))) => (figures, found, None),
            Some(Err(error)) => (Vec::new(), Vec::new(), Some(format!("Its rows are not understood: {error}."))),
            None => (Vec::new(), Vec::new(), Some("This version of Spile has no figures of it.".to_owned())),
        };
        let found = match found.is_empty() {
            true => found_here(&known.experiment, &known.json.to_string()).into_iter().collect(),
            false => found,
        };
        Self { known, figures, why_none, found }
    }
}
