//! `spile report`: one page of HTML from the files that experiments have written.
//!
//! The page needs nothing else: no network, no script, no font. It describes the machine, and for each result it sets what the article
//! found beside what was found here, and draws every figure with its values in a table behind it. A file that is no result of
//! an experiment is named in a section of its own. [`Live`] serves a page of a running server with figures of the same kind.

mod drawn;
mod live;
mod page;
mod results;
mod tables;

use std::path::PathBuf;

use spile_core::{Error, ErrorKind, Result};

pub use live::Live;
pub use results::{Found, Known, NotUnderstood};

/// A page is smaller than this.
pub const MAX_BYTES: usize = 2_000_000;

/// Rows of a table that are shown, fewer where the page would become too large.
const ROWS: [usize; 4] = [1000, 200, 40, 0];

/// What a page was made of.
#[derive(Debug)]
pub struct Report {
    /// The page.
    pub html: String,
    /// Results that are on it.
    pub results: usize,
    /// Figures that are on it.
    pub figures: usize,
    /// Files that were not understood.
    pub not_understood: Vec<NotUnderstood>,
}

/// Makes the page of the JSON files in `places`: folders, which are not searched further, and files.
///
/// # Errors
/// `NotFound` when a place is not there or no JSON file is in it; `InvalidInput` when the figures alone are too large for a page.
pub fn make(places: &[PathBuf]) -> Result<Report> {
    let found = results::find(places)?;
    let sections: Vec<drawn::Section> = found.known.iter().map(drawn::Section::new).collect();
    let pages = ROWS.iter().map(|rows| page::html(&sections, &found.not_understood, *rows));
    let html = pages.into_iter().find(|html| html.len() < MAX_BYTES);
    let html = html.ok_or_else(|| {
        let error = Error::new(ErrorKind::InvalidInput, "the figures of so many results make no page below 2 MB");
        error.hint("make several pages, each of fewer folders")
    })?;
    let figures = sections.iter().map(|section| section.figures.len()).sum();
    Ok(Report { html, results: sections.len(), figures, not_understood: found.not_understood })
}

#[cfg(test)]
mod tests;
