//! The files that a report is made of.

use std::path::{Path, PathBuf};

use serde_json::Value;
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_store::own::read_named;

use crate::experiments::HostFacts;

/// A file of results is smaller than this.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// What was found in the places of a report.
#[derive(Debug, Default)]
pub struct Found {
    /// Results of experiments.
    pub known: Vec<Known>,
    /// Other files.
    pub not_understood: Vec<NotUnderstood>,
}

/// A file with the results of an experiment.
#[derive(Debug)]
pub struct Known {
    /// Where it is.
    pub path: PathBuf,
    /// The name of the experiment.
    pub experiment: String,
    /// The machine.
    pub host: HostFacts,
    /// All of it.
    pub json: Value,
}

/// A file that is no result of an experiment.
#[derive(Debug)]
pub struct NotUnderstood {
    /// Where it is.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: String,
}

/// Reads all JSON files of `places`: folders, which are not searched further, and files.
///
/// # Errors
/// `NotFound` with the path when a place is not there, or when there is no JSON file at all.
pub fn find(places: &[PathBuf]) -> Result<Found> {
    let mut paths = Vec::new();
    for place in places {
        paths.extend(files_of(place)?);
    }
    if paths.is_empty() {
        let names: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
        let error = Error::new(ErrorKind::NotFound, format!("there is no JSON file in {}", names.join(", ")));
        return Err(error.hint("`spile bench NAME --out DIR` writes results"));
    }
    let mut found = Found::default();
    for path in paths {
        match read(&path) {
            Ok(known) => found.known.push(known),
            Err(why) => found.not_understood.push(NotUnderstood { path, why }),
        }
    }
    // The order of the experiments is that in which they are told of; others come last.
    let rank = |name: &str| crate::experiments::about::EXPERIMENTS.iter().position(|about| about.name == name);
    found.known.sort_by_key(|known| (rank(&known.experiment).unwrap_or(usize::MAX), known.path.clone()));
    Ok(found)
}

fn files_of(place: &Path) -> Result<Vec<PathBuf>> {
    let about = std::fs::metadata(place).map_err(|e| Error::io("look for results", e)).at_path(place)?;
    if !about.is_dir() {
        return Ok(vec![place.to_owned()]);
    }
    let entries = std::fs::read_dir(place).map_err(|e| Error::io("look for results", e)).at_path(place)?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io("look for results", e)).at_path(place)?.path();
        if path.extension().is_some_and(|extension| extension == "json") && path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The result in a file, or what is wrong with it.
fn read(path: &Path) -> Result<Known, String> {
    let len_bytes = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
    if len_bytes > MAX_FILE_BYTES {
        return Err("it is longer than 64 MiB".to_owned());
    }
    let bytes = read_named(path, MAX_FILE_BYTES).map_err(|error| error.to_string())?;
    let json: Value = serde_json::from_slice(&bytes).map_err(|error| format!("it is no JSON: {error}"))?;
    let is_result = json["experiment"].is_string() && json["rows"].is_array();
    if !is_result {
        return Err("it has no `experiment` and `rows`, so it is no result of `spile bench`".to_owned());
    }
    let host = serde_json::from_value(json["host"].clone()).map_err(|error| format!("its `host`: {error}"))?;
    Ok(Known {
        path: path.to_owned(),
        experiment: json["experiment"].as_str().unwrap_or_default().to_owned(),
        host,
        json,
    })
}
