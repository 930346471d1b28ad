//! Calls of the control API, as any HTTP client makes them.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// Sends bytes to the control socket and reads until the server hangs up: the status and the body.
pub fn http(socket: &Path, request: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, body.to_owned())
}

/// One call: the status and the body.
pub fn ask(socket: &Path, method: &str, path: &str, body: &str) -> (u16, Value) {
    let length = body.len();
    let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
    let (status, body) = http(socket, &format!("{head}{body}"));
    (status, serde_json::from_str(&body).unwrap_or(Value::Null))
}
