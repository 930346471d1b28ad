//! The TCP address of the metrics, if the operator asks for one. Nothing but `/metrics` is answered there, and nothing can be changed.
//!
//! Anybody may call there, so a call is cheap: one text of the series answers all that come within a second and want that format, and no caller gets
//! more series than the operator allows. Connections are bounded in number, time and the size of their headers; each takes one request.
//! One host has half of the places at most. Its
//! further callers wait, and those of others do not wait for them. The thread has no timer while nobody calls.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, TcpListener as StdListener};
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use spile_core::{Error, ErrorKind, Result};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Notify, Semaphore};
use tokio::time::{sleep, timeout};

use super::accept::{Format, choose};
use super::{Detail, Exporter, written};
use crate::serving::api::refusal;
use crate::uri::Address;

/// The most connections at a time.
const MAX_CONNECTIONS: usize = 64;
/// The most connections of one host that are answered at a time; further ones wait.
const MAX_AT_WORK: usize = MAX_CONNECTIONS / 2;
/// The most connections of one host, those that wait included; further ones are hung up on.
const MAX_OF_A_HOST: usize = 128;
/// The most of one network: a host with many addresses leaves the others room.
const MAX_OF_A_NETWORK: usize = 256;
/// The most callers of all hosts that are answered or wait: each has a descriptor.
const MAX_WAITING: usize = 512;
/// How long a caller may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a call may take, its answer included.
const CALL_PATIENCE: Duration = Duration::from_secs(30);
/// How long a caller may take to read the answer.
const READER_PATIENCE: Duration = Duration::from_secs(5);
/// How long one collection of the series answers all callers.
const KEPT: Duration = Duration::from_secs(1);
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

/// The answer of the control socket to a scrape with these headers and this query: `detail=disk`, `layer` or `queue`.
///
/// # Errors
/// `InvalidInput` when the query has another key or value; `Shutdown` while the server hands over.
pub async fn respond(exporter: &Exporter, headers: &HeaderMap, query: Option<&str>) -> Result<Response> {
    let detail = detail_of(query)?.unwrap_or(exporter.detail);
    let format = format_of(headers);
    Ok(answer(format, written(&exporter.collect(detail).await?, format).into()))
}

/// The detail that a query asks for.
fn detail_of(query: Option<&str>) -> Result<Option<Detail>> {
    let mut detail = None;
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let value = pair.strip_prefix("detail=");
        let value = value.ok_or_else(|| format!("the query knows detail=disk|layer|queue, and not {pair:?}"));
        let known = value.and_then(Detail::from_str).map_err(|why| Error::new(ErrorKind::InvalidInput, why))?;
        detail = Some(known);
    }
    Ok(detail)
}

/// The format that the headers ask for.
fn format_of(headers: &HeaderMap) -> Format {
    // A list may be spread over several headers.
    let accept: Vec<_> = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    choose(&accept.join(","))
}

fn answer(format: Format, text: Bytes) -> Response {
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}

/// What answers callers over TCP.
#[derive(Clone)]
struct Answers {
    exporter: Exporter,
    /// What was written within the last second. It is locked while something is collected: further callers wait for that.
    kept: Arc<Mutex<HashMap<(Detail, Format), Bytes>>>,
}

impl Answers {
    fn new(exporter: Exporter) -> Self {
        Self { exporter, kept: Arc::default() }
    }

    async fn respond(&self, headers: &HeaderMap, query: Option<&str>) -> Result<Response> {
        let most = self.exporter.detail;
        let detail = detail_of(query)?.map_or(most, |asked| asked.min(most));
        let format = format_of(headers);
        Ok(answer(format, self.text(detail, format).await?))
    }

    async fn text(&self, detail: Detail, format: Format) -> Result<Bytes> {
        let mut kept = self.kept.lock().await;
        if let Some(text) = kept.get(&(detail, format)) {
            return Ok(text.clone());
        }
        let text = Bytes::from(written(&self.exporter.collect(detail).await?, format));
        kept.insert((detail, format), text.clone());
        let kept = self.kept.clone();
        tokio::spawn(async move {
            sleep(KEPT).await;
            kept.lock().await.remove(&(detail, format));
        });
        Ok(text)
    }
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
                Ok(listener) => accept(listener, router(Answers::new(exporter))).await,
                Err(error) => tracing::error!(%error, "the address of the metrics cannot be heard"),
            }
        });
    };
    std::thread::Builder::new().name("spile-metrics".to_owned()).spawn(body).map(drop).map_err(failed)
}

fn router(answers: Answers) -> Router {
    let answer = async |State(answers): State<Answers>, headers: HeaderMap, RawQuery(query): RawQuery| {
        answers.respond(&headers, query.as_deref()).await.unwrap_or_else(refusal)
    };
    let unknown = || refusal(Error::new(ErrorKind::NotFound, "only GET /metrics is answered here"));
    Router::new().route("/metrics", get(answer)).fallback(async move || unknown()).with_state(answers)
}

async fn accept(listener: TcpListener, router: Router) {
    let (places, hosts, networks) = (Arc::new(Semaphore::new(MAX_CONNECTIONS)), Hosts::default(), Hosts::default());
    let waiting = Arc::new(Semaphore::new(MAX_WAITING));
    loop {
        let Ok(caller_place) = waiting.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, from)) => {
                let address = from.ip().to_canonical();
                let Some(caller) = hosts.enter(address, MAX_OF_A_HOST) else { continue };
                let Some(of_network) = networks.enter(network_of(address), MAX_OF_A_NETWORK) else { continue };
                let (router, places) = (router.clone(), places.clone());
                tokio::spawn(async move {
                    let _counted = (caller_place, of_network);
                    let all_places = async { (caller.places.acquire().await, places.acquire().await) };
                    // Whoever waits for longer than that asks again.
                    if let Ok(_places) = timeout(CALL_PATIENCE, all_places).await {
                        serve(stream, router, READER_PATIENCE).await;
                    }
                });
            }
            // Such as for want of descriptors, and then the next try fails as well.
            Err(_) => sleep(ACCEPT_REST).await,
        }
    }
}

/// The network of an address. One host has as many addresses as it wants in its IPv6 network of 64 bits.
fn network_of(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

/// The hosts that have callers.
#[derive(Clone, Default)]
struct Hosts(Arc<std::sync::Mutex<HashMap<IpAddr, Host>>>);

/// One host, and how many of its callers are answered or wait.
struct Host {
    places: Arc<Semaphore>,
    callers: usize,
}

/// A caller that is answered or waits, counted until this is dropped.
struct Caller {
    hosts: Hosts,
    host: IpAddr,
    places: Arc<Semaphore>,
}

impl Hosts {
    /// Counts one more caller of `host`; `None` when too many wait.
    fn enter(&self, host: IpAddr, most: usize) -> Option<Caller> {
        let mut hosts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_host =
            hosts.entry(host).or_insert_with(|| Host { places: Arc::new(Semaphore::new(MAX_AT_WORK)), callers: 0 });
        if of_host.callers >= most {
            return None;
        }
        of_host.callers += 1;
        Some(Caller { hosts: self.clone(), host, places: of_host.places.clone() })
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let mut hosts = self.hosts.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(host) = hosts.get_mut(&self.host) {
            host.callers -= 1;
        }
        hosts.retain(|_, host| host.callers > 0);
    }
}

/// One call. The caller has so long to read the answer.
async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, router: Router, reader_patience: Duration) {
    let (router, answered) = (TowerToHyperService::new(router), Notify::new());
    let service = service_fn(|request| {
        let answer = router.call(request);
        async {
            let answer = answer.await;
            answered.notify_one();
            answer
        }
    });
    let mut server = hyper::server::conn::http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(PATIENCE).keep_alive(false).max_buf_size(16 << 10);
    let call = server.serve_connection(TokioIo::new(stream), service);
    let is_slow = async {
        answered.notified().await;
        sleep(reader_patience).await;
    };
    // What fails here the caller sees.
    tokio::select! {
        _ = timeout(CALL_PATIENCE, call) => {}
        () = is_slow => {}
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use spile_engine::{Config, Engine};
    use tokio::net::UnixStream;

    use super::super::Source;
    use super::*;
    use crate::serving::api::view::View;

    fn on_runtime<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    #[test]
    fn one_text_answers_all_that_come_within_a_second_and_none_is_finer_than_allowed() {
        let engine = Engine::start(Config::default()).unwrap();
        let view = Arc::new(View::new(engine.clone(), Arc::default()));
        view.show(Some(Vec::new()));
        let answers = Answers::new(Exporter::new(Source::Server(view), Detail::Layer));
        on_runtime(async {
            let text = |detail| answers.text(detail, Format::Text);
            let first = text(Detail::Layer).await.unwrap();
            let (second, third) = tokio::join!(text(Detail::Layer), text(Detail::Disk));
            assert!(first.as_ptr() == second.unwrap().as_ptr() && first.as_ptr() != third.unwrap().as_ptr());
            for query in ["detail=queue", "detail=layer", "detail=disk", ""] {
                answers.respond(&HeaderMap::new(), Some(query)).await.unwrap();
            }
            assert!(!answers.kept.lock().await.contains_key(&(Detail::Queue, Format::Text)));
            while answers.kept.lock().await.contains_key(&(Detail::Layer, Format::Text)) {
                sleep(Duration::from_millis(10)).await;
            }
            assert!(first.as_ptr() != text(Detail::Layer).await.unwrap().as_ptr());
        });
        engine.shutdown();
    }

    #[test]
    fn one_host_cannot_take_all_places() {
        let (hosts, hog, other) = (Hosts::default(), [1, 1, 1, 1].into(), [2, 2, 2, 2].into());
        let callers: Vec<_> = std::iter::from_fn(|| hosts.enter(hog, MAX_OF_A_HOST)).collect();
        assert_eq!(callers.len(), MAX_OF_A_HOST);
        assert_eq!(callers[0].places.available_permits(), MAX_CONNECTIONS / 2);
        assert!(hosts.enter(other, MAX_OF_A_HOST).is_some());
        drop(callers);
        assert!(hosts.enter(hog, MAX_OF_A_HOST).is_some() && hosts.0.lock().unwrap().is_empty());
    }

    #[test]
    fn who_does_not_read_the_answer_is_hung_up_on() {
        on_runtime(async {
            let (mut caller, server) = std::os::unix::net::UnixStream::pair().unwrap();
            caller.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
            server.set_nonblocking(true).unwrap();
            let server = UnixStream::from_std(server).unwrap();
            let router = Router::new().route("/metrics", get(async || vec![0u8; 64 << 20]));
            // It would wait for `CALL_PATIENCE` else.
            let served = timeout(CALL_PATIENCE / 2, serve(server, router, Duration::from_millis(50))).await;
            assert!(served.is_ok());
            drop(caller);
        });
    }

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
