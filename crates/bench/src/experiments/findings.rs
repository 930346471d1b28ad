//! What each experiment found, in one line, from its result file: to stand beside what the article found.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::sample::median;
use super::{Direction, Outcome, aggregate, crowd, density, depth, exchange, geometry, hung, layers, paths, warmup};
use spile_server::units::{format_size, format_us};

/// What the experiment of that name found, from the text of its result file. `None` when the file is of something else.
pub fn found_here(experiment: &str, json: &str) -> Option<String> {
    match experiment {
        "depth" => of(json, depth::finding),
        "shape" => of(json, shape),
        "layers" => of(json, layers::finding),
        "geometry" => of(json, geometry::finding),
        "warmup" => of(json, warmup::finding),
        "density" => of(json, density::finding),
        "paths" => of(json, paths),
        "aggregate" => of(json, aggregate),
        "exchange" => of(json, exchange),
        "crowd" => of(json, crowd),
        "hung" => of(json, hung),
        _ => None,
    }
}

fn of<P: DeserializeOwned, R: DeserializeOwned>(json: &str, say: fn(&Outcome<P, R>) -> String) -> Option<String> {
    serde_json::from_str(json).ok().map(|outcome| say(&outcome))
}

/// The median over the rows; 0 of none.
fn middle<P, R>(outcome: &Outcome<P, R>, value: impl Fn(&R) -> f64) -> f64 {
    median(outcome.rows.iter().map(value).collect())
}

/// What is needed here of a row of `shape`.
#[derive(Deserialize)]
struct ShapeRow {
    store: String,
    side: String,
    request_bytes: u64,
    bytes_per_s: f64,
}

fn shape(outcome: &Outcome<serde_json::Value, ShapeRow>) -> String {
    let largest = outcome.rows.iter().map(|row| row.request_bytes).max().unwrap_or(0);
    let speed = |store: &str, side: &str| {
        let rows = outcome.rows.iter();
        let here = rows.filter(|row| row.store == store && row.side == side && row.request_bytes == largest);
        median(here.map(|row| row.bytes_per_s).collect())
    };
    let stores = ["model", "given"].into_iter().filter(|store| speed(store, "bare") > 0.0);
    let each = stores.map(|store| {
        let by_bare = |side: &str| speed(store, side) / speed(store, "bare");
        format!("{store} disk: off {:.2}, split {:.2}, auto {:.2}", by_bare("off"), by_bare("split"), by_bare("auto"))
    });
    let each = each.collect::<Vec<_>>().join("; ");
    format!("a guest's reads of {} at depth 1, by bare ones: {each}", format_size(largest))
}

fn paths(outcome: &Outcome<paths::Asked, paths::Row>) -> String {
    let reads = || outcome.rows.iter().filter(|row| row.op == Direction::Read);
    let ends = [reads().map(|row| row.request_bytes).min(), reads().map(|row| row.request_bytes).max()];
    let of_size = |size: u64| {
        let each = reads().filter(|row| row.request_bytes == size);
        let each: Vec<String> = each.map(|row| format!("{} {}", row.path, format_us(row.latency_p50_us))).collect();
        format!("reads of {}: {}", format_size(size), each.join(", "))
    };
    ends.into_iter().flatten().map(of_size).collect::<Vec<_>>().join("; ")
}

fn aggregate(outcome: &Outcome<aggregate::Asked, aggregate::Row>) -> String {
    let most = |path: &str, direction: Direction| {
        let rows = outcome.rows.iter().filter(|row| row.path == path && row.op == direction);
        rows.map(|row| row.bytes_per_second / 1e9).fold(0.0, f64::max)
    };
    let mut names: Vec<&str> = Vec::new();
    for row in outcome.rows.iter().filter(|row| !row.path.is_empty()) {
        if !names.contains(&row.path.as_str()) {
            names.push(&row.path);
        }
    }
    let (write, read) = (Direction::Write, Direction::Read);
    let each = names.iter().map(|name| format!("{name} {:.1} and {:.1}", most(name, write), most(name, read)));
    format!("GB/s at most, writing and reading: {}", each.collect::<Vec<_>>().join(", "))
}

fn exchange(outcome: &Outcome<exchange::Asked, exchange::Row>) -> String {
    let longer_ms = middle(outcome, |row| row.longest_with_us - row.longest_without_us) / 1000.0;
    format!("an exchange makes the longest request {longer_ms:+.2} ms longer (median of {} rounds)", outcome.rows.len())
}

fn crowd(outcome: &Outcome<crowd::Parameters, crowd::Row>) -> String {
    let ratio = middle(outcome, |row| row.crowd_iops / row.alone_iops);
    format!("IOPS beside {} idle disks, by those alone: {ratio:.3}", outcome.parameters.disks - 1)
}

fn hung(outcome: &Outcome<hung::Parameters, hung::Row>) -> String {
    let (p99, iops) = (
        middle(outcome, |row| row.beside_p99_us / row.alone_p99_us),
        middle(outcome, |row| row.beside_iops / row.alone_iops),
    );
    format!("p99 beside a store that hangs, by that alone: {p99:.2}; IOPS: {iops:.2}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::HostFacts;

    #[test]
    fn a_file_of_something_else_is_told_apart() {
        assert_eq!(found_here("crowd", "{}"), None);
        assert_eq!(found_here("everything", "{}"), None);
    }

    #[test]
    fn splitting_is_held_against_the_bare_store() {
        let row = |side: &str, bytes_per_s: f64| serde_json::json!({ "store": "model", "side": side, "request_bytes": 4 << 20, "bytes_per_s": bytes_per_s });
        let outcome = Outcome {
            experiment: "shape".to_owned(),
            host: HostFacts::now(),
            parameters: (),
            rows: vec![row("bare", 100.0), row("off", 90.0), row("split", 300.0), row("auto", 250.0)],
        };
        let found = found_here("shape", &serde_json::to_string(&outcome).unwrap()).unwrap();
        assert!(found.ends_with("by bare ones: model disk: off 0.90, split 3.00, auto 2.50"), "{found}");
    }

    #[test]
    fn the_median_of_the_rounds_is_what_was_found() {
        let row = |crowd_iops| crowd::Row {
            alone_iops: 100.0,
            crowd_iops,
            alone_cpu_us: 1.0,
            crowd_cpu_us: 1.0,
            crowd_threads: 2,
        };
        let outcome = Outcome {
            experiment: "crowd".to_owned(),
            host: HostFacts::now(),
            parameters: crowd::Parameters::new(true),
            rows: vec![row(90.0), row(98.0), row(300.0)],
        };
        let json = serde_json::to_string(&outcome).unwrap();
        let found = found_here("crowd", &json).unwrap();
        assert_eq!(found, "IOPS beside 19 idle disks, by those alone: 0.980");
    }
}
