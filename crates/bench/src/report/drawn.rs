//! What is drawn and said of a result.

use super::results::Known;
use crate::experiments::Figures;
use crate::experiments::findings::{Shown, show};

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

impl<'a> Section<'a> {
    /// Draws what can be drawn of a result.
    pub fn new(known: &'a Known) -> Self {
        let without = |why: String| Self { known, figures: Figures::new(), why_none: Some(why), found: Vec::new() };
        match show(&known.experiment, known.json.clone()) {
            Some(Ok(Shown { figures, found })) => Self { known, figures, why_none: None, found },
            Some(Err(error)) => without(format!("Its rows are not understood: {error}.")),
            None => without("This version of Spile has no figures of it.".to_owned()),
        }
    }
}
