//! Calls of the control API, for commands. Each call has a connection of its own, and every wait is bounded.

use std::path::Path;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use futures_util::StreamExt;
use hyper::Request;
use hyper::header::{CONTENT_TYPE, HeaderName};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_store::own_folder;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::types::Failure;
use crate::socket_path::SocketPath;

/// The longest answer in bytes.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// How long a server may take to answer a call that only looks.
pub const LOOK_PATIENCE: Duration = Duration::from_secs(5);
/// How long a server may take to change something: disks are flushed, opened and closed.
pub const CHANGE_PATIENCE: Duration = Duration::from_secs(150);

/// As [`call`], with the answer as one of the API's types.
///
/// # Errors
/// As [`call`]; `Protocol` when the answer is of another type.
pub fn ask<T: DeserializeOwned>(socket: &Path, method: &str, path: &str, patience: Duration) -> Result<T> {
    typed(call(socket, method, path, None, patience)?)
}

/// An answer as one of the API's types.
///
/// # Errors
/// `Protocol` when it is of another type.
pub fn typed<T: DeserializeOwned>(answer: Value) -> Result<T> {
    serde_json::from_value(answer)
        .map_err(|e| Error::new(ErrorKind::Protocol, "the server's answer is not understood").caused_by(e))
}

/// Asks the server at the control socket `socket`. `path` begins with `/v1/`. An answer without a body is `null`.
///
/// # Errors
/// `NotFound` when no server listens there; `TimedOut` when the answer does not come within `patience`; else what the server answers.
pub fn call(socket: &Path, method: &str, path: &str, body: Option<&Value>, patience: Duration) -> Result<Value> {
    runtime()?.block_on(within(socket, method, path, body, patience))
}

/// What runs calls on this thread.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|e| Error::io("start a call", e))
}

/// As [`call`], for callers with a runtime of their own.
pub(super) async fn within(
    socket: &Path,
    method: &str,
    path: &str,
    body: Option<&Value>,
    patience: Duration,
) -> Result<Value> {
    let late = |_| Error::new(ErrorKind::TimedOut, "the server does not answer on its control socket");
    let answer = timeout(patience, exchange(socket, method, path, JSON, body)).await;
    let (status, bytes) = answer.map_err(late).and_then(|answer| answer).at_path(socket)?;
    let not_understood =
        |e| Error::new(ErrorKind::Protocol, "the server's answer is not understood").caused_by(e).at_path(socket);
    if !(200..300).contains(&status) {
        let failure: Failure = serde_json::from_slice(&bytes).map_err(not_understood)?;
        return Err(failure.into_error());
    }
    if bytes.is_empty() { Ok(Value::Null) } else { serde_json::from_slice(&bytes).map_err(not_understood) }
}

/// Asks the server for an answer that comes line by line, each a JSON value of type `T`. `each` gets them as they come. Between two of
/// them the server may be silent for as long as `patience`.
///
/// # Errors
/// As [`ask`]; `Protocol` when the answer breaks off.
pub fn lines<T: DeserializeOwned>(
    socket: &Path,
    method: &str,
    path: &str,
    patience: Duration,
    each: impl FnMut(T),
) -> Result<()> {
    runtime()?.block_on(take_lines(socket, method, path, patience, each)).at_path(socket)
}

async fn take_lines<T: DeserializeOwned>(
    socket: &Path,
    method: &str,
    path: &str,
    patience: Duration,
    mut each: impl FnMut(T),
) -> Result<()> {
    let late = |_| Error::new(ErrorKind::TimedOut, "the server does not answer on its control socket");
    let broken = |e| Error::new(ErrorKind::Protocol, "the answer breaks off").caused_by(e);
    let not_understood = |e| Error::new(ErrorKind::Protocol, "the server's answer is not understood").caused_by(e);
    let (status, body) = timeout(patience, begin(socket, method, path, JSON, None)).await.map_err(late)??;
    if !(200..300).contains(&status) {
        let bytes = to_bytes(body, MAX_ANSWER_BYTES).await.map_err(broken)?;
        return Err(serde_json::from_slice::<Failure>(&bytes).map_err(not_understood)?.into_error());
    }
    let (mut stream, mut text) = (body.into_data_stream(), Vec::new());
    while let Some(bytes) = timeout(patience, stream.next()).await.map_err(late)? {
        text.extend_from_slice(&bytes.map_err(broken)?);
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        for line in text[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            each(serde_json::from_slice(line).map_err(not_understood)?);
        }
        text.drain(..whole);
    }
    Ok(())
}

/// The header of calls whose bodies are JSON.
const JSON: (HeaderName, &str) = (CONTENT_TYPE, "application/json");

/// One call with a header: the status and the body of the answer.
pub(crate) async fn exchange(
    socket: &Path,
    method: &str,
    path: &str,
    header: (HeaderName, &str),
    body: Option<&Value>,
) -> Result<(u16, Vec<u8>)> {
    let (status, body) = begin(socket, method, path, header, body).await?;
    let bytes = to_bytes(body, MAX_ANSWER_BYTES).await;
    let bytes = bytes.map_err(|e| Error::new(ErrorKind::Protocol, "the answer breaks off").caused_by(e))?;
    Ok((status, bytes.to_vec()))
}

/// Sends a call, and returns the status and the body of its answer. The connection ends with this thread's runtime.
async fn begin(
    socket: &Path,
    method: &str,
    path: &str,
    header: (HeaderName, &str),
    body: Option<&Value>,
) -> Result<(u16, Body)> {
    let hung_up =
        |e: hyper::Error| Error::new(ErrorKind::Protocol, "the server has hung up on the control socket").caused_by(e);
    own_folder::refuse_foreign_socket(socket)?;
    let reached = SocketPath::of(socket).map_err(not_there)?;
    let stream = UnixStream::connect(reached.path()).await.map_err(not_there)?;
    let peer = stream.peer_cred().map_err(|e| Error::io("ask who listens on the control socket", e))?;
    if !own_folder::is_trusted_user(peer.uid()) {
        return Err(own_folder::foreign_socket(peer.uid()).at_path(socket));
    }
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(hung_up)?;
    tokio::spawn(connection);
    let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
    let request = Request::builder().method(method).uri(path).header("host", "spile");
    let request = request.header(header.0, header.1).body(body);
    let request = request.map_err(|e| Error::new(ErrorKind::InvalidInput, "make a request").caused_by(e))?;
    let answer = sender.send_request(request).await.map_err(hung_up)?;
    Ok((answer.status().as_u16(), Body::new(answer.into_body())))
}

fn not_there(error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => {
            Error::new(ErrorKind::NotFound, "no server listens on this control socket")
                .hint("start `spile serve` with --control")
        }
        _ => Error::io("cannot connect to the control socket", error),
    }
}

/// `text` as one piece of a path.
pub fn escape(text: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(escape).collect()
}
