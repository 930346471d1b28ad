//! The TCP address of the metrics, if the operator asks for one. Nothing but `/metrics` is answered there, and nothing can be changed.
//!
//! The thread has no timer while nobody is connected. Connections are bounded in number, time and the size of their headers; each takes one
//! request. Further callers wait in the kernel's queue.

use std::net::TcpListener as StdListener;
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use spile_core::{Error, ErrorKind, Result};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::{Detail, Exporter};
use crate::serving::api::refusal;
use crate::uri::Address;

/// The most connections at a time.
const MAX_CONNECTIONS: usize = 64;
/// How long a caller may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a call may take, its answer included.
const CALL_PATIENCE: Duration = Duration::from_secs(30);
/// How long the thread rests after an accept that failed.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// An address for metrics: `HOST:PORT`, or a port of the loopback address alone.
///
/// # Errors
/// What can be written.
pub fn parse_address(text: &str) -> Result<Address, String> {
    let text = text.strip_prefix("tcp:").unwrap_or(text);
    let full = if text.parse::<u16>().is_ok() { format!("tcp:127.0.0.1:{text}") } else { format!("tcp:{text}") };
    let wrong = |_| format!("`{text}` is not an address for metrics; write HOST:PORT, or PORT for this host alone");
    full.parse().map_err(wrong)
}

/// The answer to a scrape with these headers and this query: `detail=disk`, `layer` or `queue`.
///
/// # Errors
/// `InvalidInput` when the query has another key or value; else as [`Exporter::answer`].
pub async fn respond(exporter: &Exporter, headers: &HeaderMap, query: Option<&str>) -> Result<Response> {
    let mut detail = None;
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let value = pair.strip_prefix("detail=");
        let value = value.ok_or_else(|| format!("the query knows detail=disk|layer|queue, and not {pair:?}"));
        let known = value.and_then(Detail::from_str).map_err(|why| Error::new(ErrorKind::InvalidInput, why))?;
        detail = Some(known);
    }
    // A list may be spread over several headers.
    let accept: Vec<_> = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let exposition = exporter.answer(&accept.join(","), detail).await?;
    Ok(([(header::CONTENT_TYPE, exposition.content_type)], exposition.body).into_response())
}

/// Answers scrapes on a TCP socket, on a thread of its own.
///
/// # Errors
/// When the thread or its runtime cannot be started.
pub fn listen(fd: OwnedFd, exporter: Exporter) -> Result<()> {
    let failed = |source| Error::io("start the thread of the metrics", source);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let listener = StdListener::from(fd);
    listener.set_nonblocking(true).map_err(failed)?;
    let body = move || {
        // It ends with the process.
        runtime.block_on(async {
            match TcpListener::from_std(listener) {
                Ok(listener) => accept(listener, router(exporter)).await,
                Err(error) => tracing::error!(%error, "the address of the metrics cannot be heard"),
            }
        });
    };
    std::thread::Builder::new().name("spile-metrics".to_owned()).spawn(body).map(drop).map_err(failed)
}

fn router(exporter: Exporter) -> Router {
    let answer = async |State(exporter): State<Exporter>, headers: HeaderMap, RawQuery(query): RawQuery| {
        respond(&exporter, &headers, query.as_deref()).await.unwrap_or_else(refusal)
    };
    let unknown = || refusal(Error::new(ErrorKind::NotFound, "only GET /metrics is answered here"));
    Router::new().route("/metrics", get(answer)).fallback(async move || unknown()).with_state(exporter)
}

async fn accept(listener: TcpListener, router: Router) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let router = router.clone();
                tokio::spawn(async move {
                    serve(stream, router).await;
                    drop(place);
                });
            }
            // Such as for want of descriptors, and then the next try fails as well.
            Err(_) => sleep(ACCEPT_REST).await,
        }
    }
}

/// One call.
async fn serve(stream: TcpStream, router: Router) {
    let mut server = hyper::server::conn::http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(PATIENCE).keep_alive(false).max_buf_size(16 << 10);
    let call = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    // What fails here the caller sees.
    let _ = timeout(CALL_PATIENCE, call).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_of_this_host() {
        let tcp = |host: &str, port| Ok(Address::Tcp(host.to_owned(), port));
        assert_eq!(parse_address("9100"), tcp("127.0.0.1", 9100));
        assert_eq!(parse_address("0.0.0.0:1"), tcp("0.0.0.0", 1));
        assert_eq!(parse_address("[::1]:9100"), tcp("::1", 9100));
        assert_eq!(parse_address("tcp:a:0"), tcp("a", 0));
        for bad in ["", "host", ":", "unix:/a", "70000", "a:b"] {
            assert!(parse_address(bad).is_err(), "{bad}: {:?}", parse_address(bad));
        }
    }
}
