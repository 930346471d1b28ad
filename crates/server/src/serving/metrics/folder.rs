//! The metrics of all servers whose control sockets are in one folder, under one address: what `spile xen-backend` answers, whose disks have
//! a process each.

use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::header;
use futures_util::StreamExt as _;
use futures_util::stream::iter;
use spile_core::{Error, ErrorKind, Result};
use tokio::time::timeout;

use super::accept::Format;
use super::families::{Families, Family, Label, Value, decode};
use super::{Detail, process};
use crate::serving::api::client::exchange;
use crate::serving::api::discovery::{AT_ONCE, sockets};

/// How long a server may take to answer. Servers are asked beside each other.
const PATIENCE: Duration = Duration::from_secs(5);

/// What each server in `folder` says now, with a label `server`, the name of its control socket; and what this process takes itself.
///
/// # Errors
/// When the folder cannot be read.
pub async fn collect(folder: &Path, detail: Detail) -> Result<Families> {
    let ask = async |socket: PathBuf| {
        let answer = ask(&socket, detail).await;
        (socket, answer)
    };
    // One that hangs holds up no other.
    let mut answers: Vec<_> = iter(sockets(folder)?).map(ask).buffer_unordered(AT_ONCE).collect().await;
    answers.sort_by(|(one, _), (other, _)| one.cmp(other));
    let mut families = Families::default();
    answers.into_iter().for_each(|(socket, answer)| add(&mut families, &socket, answer));
    process::collect(&mut families);
    Ok(families)
}

async fn ask(socket: &Path, detail: Detail) -> Result<Vec<Family>> {
    let path = format!("/metrics?detail={detail}");
    let accept = (header::ACCEPT, Format::Protobuf.content_type());
    let late = |_| Error::new(ErrorKind::TimedOut, "the server does not answer");
    let answer = timeout(PATIENCE, exchange(socket, "GET", &path, accept, None)).await;
    match answer.map_err(late)?? {
        (200, bytes) => decode(&bytes),
        (status, _) => Err(Error::new(ErrorKind::Protocol, format!("the server answers with status {status}"))),
    }
}

/// Adds what a server has answered. The socket of a server that was killed is passed over.
fn add(families: &mut Families, socket: &Path, answer: Result<Vec<Family>>) {
    if answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return;
    }
    let name = socket.file_stem().unwrap_or_default().to_string_lossy();
    let server = Label::new("server", &name);
    let up = if answer.is_ok() { 1.0 } else { 0.0 };
    let help = "1 for a server that has answered, 0 for one that has not.";
    families.add("spile_server_up", help, std::slice::from_ref(&server), Value::Gauge(up));
    for mut family in answer.unwrap_or_default() {
        family.series.iter_mut().for_each(|series| series.labels.push(server.clone()));
        families.merge(family);
    }
}
