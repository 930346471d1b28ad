//! `spile shape`: what a running server does with the sizes of a disk's requests.

use clap::Args;
use serde_json::{Value, json};
use spile_core::Result;
use spile_node::Shape;
use spile_server::serving::api::client::{LOOK_PATIENCE, ask, call};
use spile_server::serving::api::types::{Disk, DiskDetail};

use super::control::{Which, path_of};
use super::{Exit, say};
use crate::units::format_size;

/// Say what a running server does with the sizes of a disk's requests
///
/// `split=SIZE` makes parts of SIZE of larger reads and writes, which are in flight together: an SSD serves them with several of its
/// channels. `merge=SIZE` makes one request of up to SIZE of neighbours that come together: a spinning disk or a network serves that
/// faster. `auto` tries into how many parts large requests are best split, with the disk's own requests, and keeps what gives more
/// throughput. SIZE is a power of two from 4k to 32M. Requests in flight end as they began. The order holds until the server ends,
/// and a server that takes over from it keeps it, unless it is given a shape itself. Without MODE the present shape is printed.
#[derive(Debug, Args)]
pub struct ShapeArgs {
    #[command(flatten)]
    which: Which,
    /// What to do from now on
    #[arg(value_name = "off|split=SIZE|merge=SIZE|auto", value_parser = parse)]
    mode: Option<Shape>,
}

fn parse(text: &str) -> Result<Shape, String> {
    text.parse().map_err(|error: spile_core::Error| error.to_string())
}

/// Runs `spile shape`.
///
/// # Errors
/// When there is no such disk.
pub fn run(args: &ShapeArgs) -> Result<Exit> {
    let (socket, name) = args.which.find()?;
    match args.mode {
        Some(mode) => {
            let body = json!({ "shape": mode.to_string() });
            call(&socket, "PATCH", &path_of(&name), Some(&body), LOOK_PATIENCE).map(|_: Value| Exit::Ok)
        }
        None => {
            let detail: DiskDetail = ask(&socket, "GET", &path_of(&name), LOOK_PATIENCE)?;
            say(describe(&detail.disk));
            Ok(Exit::Ok)
        }
    }
}

/// The shape of a disk's requests, and what `auto` has learned.
pub(super) fn describe(disk: &Disk) -> String {
    let learned = disk.shape_learned.iter().map(|learned| {
        let size = format_size(learned.from_bytes);
        match learned.parts {
            1 => format!("{}s from {size} whole", learned.operation),
            parts => format!("{}s from {size} in {parts} parts", learned.operation),
        }
    });
    let learned: Vec<_> = learned.collect();
    if learned.is_empty() { disk.shape.clone() } else { format!("{} ({})", disk.shape, learned.join(", ")) }
}
