//! What a result file shows: the figures that are drawn of it, and what was found, in sentences. One table by the experiment's name,
//! for `spile bench all` and for reports.

use serde::de::DeserializeOwned;
use serde_json::{Error, Value};

use super::{
    Figures, Outcome, aggregate, checkpoint, crowd, density, depth, exchange, geometry, hung, layers, limit, merge,
    paths, promises, shape, snapshot, tune, warmup,
};

/// What a result file shows.
pub struct Shown {
    /// The figures and their names.
    pub figures: Figures,
    /// What was found, in sentences: to stand beside what the article found.
    pub found: Vec<String>,
}

type Show = fn(Value) -> Result<Shown, Error>;

const EXPERIMENTS: &[(&str, Show)] = &[
    ("depth", |json| show_as(json, depth::figures, depth::found)),
    ("shape", |json| show_as(json, shape::figures, shape::found)),
    ("layers", |json| show_as(json, layers::figures, layers::found)),
    ("geometry", |json| show_as(json, geometry::figures, geometry::found)),
    ("warmup", |json| show_as(json, warmup::figures, warmup::found)),
    ("density", |json| show_as(json, density::figures, density::found)),
    ("paths", |json| show_as(json, paths::figures, paths::found)),
    ("aggregate", |json| show_as(json, aggregate::figures, aggregate::found)),
    ("tune", |json| show_as(json, tune::figures, tune::found)),
    ("exchange", |json| show_as(json, exchange::figures, exchange::found)),
    ("snapshot", |json| show_as(json, snapshot::figures, snapshot::found)),
    ("merge", |json| show_as(json, merge::figures, merge::found)),
    ("crowd", |json| show_as(json, crowd::figures, crowd::found)),
    ("hung", |json| show_as(json, hung::figures, hung::found)),
    ("limit", |json| show_as(json, limit::figures, limit::found)),
    ("checkpoint", |json| show_as(json, checkpoint::figures, checkpoint::found)),
    ("promises", |json| show_as(json, promises::figures, promises::found)),
];

/// What the result file `json` of the experiment of that name shows; `None` when there is no such experiment.
///
/// # Errors
/// When the file's parameters or rows are not those of the experiment.
pub fn show(experiment: &str, json: Value) -> Option<Result<Shown, Error>> {
    let (_, show) = EXPERIMENTS.iter().find(|(name, _)| *name == experiment)?;
    Some(show(json))
}

/// What was found in the text of a result file, as one paragraph. `None` when it is no result of the experiment of that name.
pub fn found_here(experiment: &str, text: &str) -> Option<String> {
    let shown = show(experiment, serde_json::from_str(text).ok()?)?;
    Some(shown.ok()?.found.join(" "))
}

fn show_as<P: DeserializeOwned, R: DeserializeOwned>(
    json: Value,
    figures: fn(&Outcome<P, R>) -> Figures,
    found: fn(&Outcome<P, R>) -> Vec<String>,
) -> Result<Shown, Error> {
    let outcome: Outcome<P, R> = serde_json::from_value(json)?;
    Ok(Shown { figures: figures(&outcome), found: found(&outcome) })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::experiments::about::EXPERIMENTS as TOLD;

    fn kept(experiment: &str) -> String {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/results");
        std::fs::read_to_string(folder.join(format!("{experiment}.json"))).unwrap()
    }

    #[test]
    fn a_file_of_something_else_is_told_apart() {
        assert_eq!(found_here("crowd", "{}"), None);
        assert_eq!(found_here("crowd", &kept("hung")), None);
        assert_eq!(found_here("everything", &kept("crowd")), None);
    }

    #[test]
    fn every_experiment_says_what_it_found_and_draws_it_well() {
        assert!(TOLD.iter().all(|told| EXPERIMENTS.iter().any(|(name, _)| *name == told.name)));
        for (name, _) in EXPERIMENTS {
            let shown = show(name, serde_json::from_str(&kept(name)).unwrap()).unwrap().unwrap();
            assert!(!shown.figures.is_empty() && !shown.found.is_empty(), "{name}");
            for sentence in &shown.found {
                assert!(
                    sentence.ends_with('.') && !sentence.contains("NaN") && !sentence.contains("inf"),
                    "{sentence}"
                );
            }
            for (figure, drawn) in &shown.figures {
                assert_eq!(drawn.faults(), Vec::<String>::new(), "{figure}");
            }
        }
    }

    #[test]
    fn every_result_says_whether_it_is_quick() {
        for (name, _) in EXPERIMENTS {
            let mut json: Value = serde_json::from_str(&kept(name)).unwrap();
            for is_quick in [true, false] {
                json["parameters"]["quick"] = is_quick.into();
                let figures = show(name, json.clone()).unwrap().unwrap().figures;
                assert!(figures.iter().all(|(_, figure)| figure.mark.is_some() == is_quick), "{name}");
            }
        }
    }

    #[test]
    fn a_result_without_rows_or_disks_makes_no_panic() {
        for (name, _) in EXPERIMENTS {
            let mut json: Value = serde_json::from_str(&kept(name)).unwrap();
            json["rows"] = Value::Array(Vec::new());
            json["parameters"]["disks"] = 0.into();
            show(name, json).unwrap().unwrap();
        }
    }
}
