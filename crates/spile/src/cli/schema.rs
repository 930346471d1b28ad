//! `spile schema`: what each `--json` output looks like. The schemas are made from the types that are printed.

use clap::Args;
use serde_json::{Map, Value, json};
use spile_core::{Error, ErrorKind, Result};
use spile_server::serving::api;
use spile_server::serving::api::checkpoints::{ChangedBlocks, CheckpointList};
use spile_server::serving::api::images::Info;
use spile_server::serving::api::slow::SlowRequests;
use spile_server::serving::api::types::{Detached, DiskDetail, DiskList, Failure, Job, JobList, Reverted, Snapshot};
use spile_server::serving::events::DiskEvent;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::amend::AmendedDisk;
use super::backup::Verified;
use super::bench::Summary;
use super::check::Checked;
use super::compare::Comparison;
use super::control::Resized;
use super::convert::Copied;
use super::create::Created;
use super::demo::Shown;
use super::gc::Collected;
use super::internal_snapshot::InternalSnapshots;
use super::limit::Limited;
use super::load::ReadBack;
use super::map::Mapped;
use super::measure::Measured;
use super::pause::PausedDisk;
use super::rebase::Rebased;
use super::receive::ReceivedDisks;
use super::revert::Deleted;
use super::snapshot::Cloned;
use super::stat::DiskStat;
use super::top::TopInterval;
use super::trace::Traced;
use super::tree::Tree;
use super::trouble::{AcceptedLoss, GoesOn, TroublePolicy};
use super::{Exit, print_text};
use crate::bench::{
    Outcome, aggregate, checkpoint, crowd, density, depth, exchange, geometry, hung, layers, limit, merge, paths,
    promises, shape, snapshot, tune, warmup,
};
use crate::load::Report;

/// Print the JSON Schema of a command's --json output
///
/// It is a schema of JSON Schema 2020-12, made from the program's own types. Without NAME, one object with all of them is
/// printed. A program should pass over keys that it does not know: later versions may have more.
#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// The words of the command, such as `info` or `bench paths`; `error` for what is printed on stderr when a command with
    /// --json fails; `api` for the control API, whose schemas are in an OpenAPI document
    name: Vec<String>,
}

/// Makes one schema.
type Make = fn() -> Value;

/// Each output by its name.
const OUTPUTS: &[(&str, Make)] = &[
    ("create", of::<Created>),
    ("info", of::<Info>),
    ("map", of::<Mapped>),
    ("check", of::<Checked>),
    ("convert", of::<Copied>),
    ("compare", of::<Comparison>),
    ("measure", of::<Measured>),
    ("ls", of::<DiskList>),
    ("show", of::<DiskDetail>),
    ("coalesce", of::<Job>),
    ("move", of::<Job>),
    ("receive", of::<ReceivedDisks>),
    ("flatten", of::<Job>),
    ("jobs", of::<JobList>),
    ("job", of::<Job>),
    ("backup", of::<JobList>),
    ("verify", of::<Verified>),
    ("restore", of::<Copied>),
    ("stat", of::<DiskStat>),
    ("top", of::<TopInterval>),
    ("limit", of::<Limited>),
    ("pause", of::<PausedDisk>),
    ("resume", of::<GoesOn>),
    ("on-error", of::<TroublePolicy>),
    ("accept-loss", of::<AcceptedLoss>),
    ("detach", of::<Detached>),
    ("resize", of::<Resized>),
    ("slow", of::<SlowRequests>),
    ("events", of::<DiskEvent>),
    ("trace", of::<Traced>),
    ("snapshot", of::<Snapshot>),
    ("clone", of::<Cloned>),
    ("rebase", of::<Rebased>),
    ("amend", of::<AmendedDisk>),
    ("revert", of::<Reverted>),
    ("delete", of::<Deleted>),
    ("internal-snapshot", of::<InternalSnapshots>),
    ("checkpoint", of::<CheckpointList>),
    ("changed", of::<ChangedBlocks>),
    ("tree", of::<Tree>),
    ("gc", of::<Collected>),
    ("load", || either(of::<Report>(), of::<ReadBack>())),
    ("bench all", of::<Summary>),
    ("bench depth", of_experiment::<depth::Asked, depth::Row>),
    ("bench density", of_experiment::<density::Asked, density::Row>),
    ("bench layers", of_experiment::<layers::Asked, layers::Row>),
    ("bench geometry", of_experiment::<geometry::Asked, geometry::Row>),
    ("bench warmup", of_experiment::<warmup::Asked, warmup::Row>),
    ("bench shape", of_experiment::<shape::Asked, shape::Row>),
    ("bench paths", of_experiment::<paths::Asked, paths::Row>),
    ("bench aggregate", of_experiment::<aggregate::Asked, aggregate::Row>),
    ("bench exchange", of_experiment::<exchange::Asked, exchange::Row>),
    ("bench snapshot", of_experiment::<snapshot::Parameters, snapshot::Row>),
    ("bench merge", of_experiment::<merge::Parameters, merge::Row>),
    ("bench crowd", of_experiment::<crowd::Parameters, crowd::Row>),
    ("bench hung", of_experiment::<hung::Parameters, hung::Row>),
    ("bench limit", of_experiment::<limit::Parameters, limit::Row>),
    ("bench checkpoint", of_experiment::<checkpoint::Parameters, checkpoint::Row>),
    ("bench promises", of_experiment::<promises::Parameters, promises::Row>),
    ("tune", of_experiment::<tune::Asked, tune::Row>),
    ("demo", of::<Shown>),
    ("error", of::<Failure>),
    ("api", || value(&api::document())),
];

/// Runs `spile schema`.
///
/// # Errors
/// `InvalidInput` when nothing has that name.
pub fn run(args: &SchemaArgs) -> Result<Exit> {
    let name = args.name.join(" ");
    let schema = match OUTPUTS.iter().find(|(other, _)| *other == name) {
        Some((_, make)) => make(),
        None if name.is_empty() => OUTPUTS.iter().map(|(name, make)| ((*name).to_owned(), make())).collect(),
        None => {
            let names: Vec<_> = OUTPUTS.iter().map(|(name, _)| *name).collect();
            let error = Error::new(ErrorKind::InvalidInput, format!("no JSON is named {name:?}"));
            return Err(error.hint(format!("there are {}", names.join(", "))));
        }
    };
    print_text(&schema).map(|()| Exit::Ok)
}

/// The schema of what `T` prints, with all that it refers to in `$defs`.
fn of<T: ToSchema>() -> Value {
    let mut parts = Vec::new();
    T::schemas(&mut parts);
    with_parts(&T::schema(), &parts)
}

/// The same of an experiment with the parameters `P` and the rows `R`, which utoipa does not count among the parts of a generic type.
fn of_experiment<P: ToSchema, R: ToSchema>() -> Value {
    let mut parts = vec![(P::name().into_owned(), P::schema()), (R::name().into_owned(), R::schema())];
    Outcome::<P, R>::schemas(&mut parts);
    with_parts(&Outcome::<P, R>::schema(), &parts)
}

fn with_parts(schema: &RefOr<Schema>, parts: &[(String, RefOr<Schema>)]) -> Value {
    let parts: Map<_, _> = parts.iter().map(|(name, schema)| (name.clone(), value(schema))).collect();
    let mut schema = value(schema);
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
    schema["$defs"] = parts.into();
    point_to_defs(&mut schema);
    schema
}

/// The schema of what is one of two things.
fn either(mut one: Value, mut other: Value) -> Value {
    let mut parts = one["$defs"].take();
    let more = other["$defs"].take();
    if let (Value::Object(parts), Value::Object(more)) = (&mut parts, more) {
        parts.extend(more);
    }
    let dialect = one["$schema"].take();
    for schema in [&mut one, &mut other] {
        schema.as_object_mut().into_iter().for_each(|schema| schema.retain(|key, _| !key.starts_with('$')));
    }
    json!({ "$schema": dialect, "$defs": parts, "oneOf": [one, other] })
}

/// References say where the parts are in an OpenAPI document; here they are elsewhere.
fn point_to_defs(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if let Some(Value::String(to)) = fields.get_mut("$ref") {
                *to = to.replace("#/components/schemas/", "#/$defs/");
            }
            fields.values_mut().for_each(point_to_defs);
        }
        Value::Array(items) => items.iter_mut().for_each(point_to_defs),
        _ => {}
    }
}

/// What utoipa says, as JSON. Its documents are plain maps and lists, so it is always possible.
fn value(schema: &impl serde::Serialize) -> Value {
    serde_json::to_value(schema).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::super::help;
    use super::*;

    /// The words of each command that has the option --json.
    fn with_json(command: &Command, words: &str, into: &mut Vec<String>) {
        if command.get_arguments().any(|argument| argument.get_id() == "json") {
            into.push(words.to_owned());
        }
        for inner in command.get_subcommands() {
            with_json(inner, format!("{words} {}", inner.get_name()).trim(), into);
        }
    }

    #[test]
    fn every_command_with_json_has_a_schema() {
        let mut commands = vec!["error".to_owned(), "api".to_owned()];
        with_json(&help::command(), "", &mut commands);
        let mut names: Vec<_> = OUTPUTS.iter().map(|(name, _)| (*name).to_owned()).collect();
        commands.sort();
        names.sort();
        assert_eq!(commands, names);
    }

    /// Numbers of bytes, of seconds and so on say their unit, or are called by it; plain counts and ratios have none.
    #[test]
    fn numbers_say_their_units_and_everything_is_described() {
        for (name, make) in OUTPUTS {
            look(name, &make());
        }
    }

    fn has_unit(name: &str) -> bool {
        let units = ["_bytes", "_s", "_us", "_ms"];
        ["bytes", "seconds"].contains(&name)
            || units.iter().any(|unit| name.ends_with(unit) || name.contains(&format!("{unit}_per_")))
    }

    /// True for a number whose description says that it is one of bytes or of seconds.
    fn is_quantity(field: &Value) -> bool {
        let kind = field["type"].to_string();
        let text = field["description"].as_str().unwrap_or_default();
        (kind.contains("integer") || kind.contains("number"))
            && ["in bytes", "in seconds", "in microseconds"].iter().any(|unit| text.contains(unit))
    }

    fn look(at: &str, schema: &Value) {
        let fields = schema.get("properties").and_then(Value::as_object);
        for (name, field) in fields.into_iter().flatten() {
            let is_described = ["description", "$ref", "oneOf"].iter().any(|key| field.get(key).is_some());
            assert!(is_described, "{at}: {name} is not described");
            assert!(has_unit(name) || !is_quantity(field), "{at}: {name} has no unit");
            let text = field["description"].as_str().unwrap_or_default();
            assert!(name == "disk" || !text.starts_with("The disk's name"), "{at}: {name} is a disk's name");
        }
        match schema {
            Value::Object(fields) => fields.iter().for_each(|(name, inner)| look(&format!("{at}/{name}"), inner)),
            Value::Array(items) => items.iter().for_each(|inner| look(at, inner)),
            _ => {}
        }
    }
}
